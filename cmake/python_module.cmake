# The cffi module ffs._native._ffs (API mode, abi3): a small Python script strips the headers and emits C.
# CMake 3.25 knows no limited ABI (Development.SABIModule is 3.26's), so its macro and suffix stand here.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

set(generated ${CMAKE_CURRENT_BINARY_DIR}/_ffs.c)
add_custom_command(
  OUTPUT ${generated}
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/ffs/_native/build.py
          ${CMAKE_CURRENT_SOURCE_DIR}/native/include/ffs/ffs.h
          ${CMAKE_CURRENT_SOURCE_DIR}/native/capi/python_ring.h ${generated}
  DEPENDS ffs/_native/build.py native/include/ffs/ffs.h native/capi/python_ring.h
  VERBATIM)
Python_add_library(_ffs MODULE ${generated})
set_target_properties(_ffs PROPERTIES SUFFIX ".abi3.so" C_VISIBILITY_PRESET hidden)
target_compile_definitions(_ffs PRIVATE Py_LIMITED_API=0x030B0000)
target_compile_options(_ffs PRIVATE -Wno-shadow -Wno-unused-parameter)
target_link_libraries(_ffs PRIVATE ffs_capi)
# What is declared and nobody defines is an error here, not at import. (--no-undefined can't be used:
# Python's own symbols are the interpreter's.)
add_custom_command(TARGET _ffs POST_BUILD VERBATIM
  COMMAND sh -c "if nm -D --undefined-only '$<TARGET_FILE:_ffs>' | grep -E ' U (_Z[A-Z]*3ffs|ffs_)'; then exit 1; fi")
install(TARGETS _ffs DESTINATION ffs/_native)
