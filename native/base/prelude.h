// Included before everything else (CMakeLists.txt): <strings.h> declares a function ffs(), which
// would clash with our namespace. Nothing here uses that function.
#pragma once

#define ffs ffs_of_libc
#include <strings.h>
#undef ffs
