// When looking pays, and when it rests (docs/ring.md, Spinning).
#include "base/spin.h"

#include "doctest/doctest.h"

using ffs::Spinner;

TEST_SUITE("spin") {
  TEST_CASE("a short turn of somebody else doesn't end the looking") {
    Spinner spinner;
    CHECK(spinner.yielded(1'000'000, 49'999));
    CHECK(spinner.pays(1'000'000));
  }

  TEST_CASE("after a long turn it rests four times as long") {
    Spinner spinner;
    CHECK_FALSE(spinner.yielded(1'000'000, 100'000));
    CHECK_FALSE(spinner.pays(1'399'999));
    CHECK(spinner.pays(1'400'000));
    CHECK_FALSE(spinner.yielded(2'000'000, 3'000'000));  // a time slice
    CHECK_FALSE(spinner.pays(13'999'999));
    CHECK(spinner.pays(14'000'000));
  }

  TEST_CASE("who looks in vain looks seldom, until something is found") {
    Spinner spinner;
    for (int i = 0; i < 8; i++) {
      CHECK(spinner.pays(1));
      spinner.missed();
    }
    int looked = 0;
    for (int i = 0; i < 160; i++) looked += spinner.pays(1) ? 1 : 0;
    CHECK(looked == 10);
    spinner.found();
    CHECK(spinner.pays(1));
  }
}
