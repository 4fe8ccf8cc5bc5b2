# The cffi module ffs._native._ffs (API mode, abi3): a small Python script strips ffs.h and emits C.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.SABIModule)

set(generated ${CMAKE_CURRENT_BINARY_DIR}/_ffs.c)
add_custom_command(
  OUTPUT ${generated}
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/ffs/_native/build.py
          ${CMAKE_CURRENT_SOURCE_DIR}/native/include/ffs/ffs.h ${generated}
  DEPENDS ffs/_native/build.py native/include/ffs/ffs.h
  VERBATIM)
Python_add_library(_ffs MODULE USE_SABI 3.11 WITH_SOABI ${generated})
target_compile_options(_ffs PRIVATE -Wno-shadow -Wno-unused-parameter)
target_link_libraries(_ffs PRIVATE ffs_capi)
install(TARGETS _ffs DESTINATION ffs/_native)
