# Read by CMake right after llama-cpp-python's own project() (CMAKE_PROJECT_llama_cpp_INCLUDE). Leaves llama.cpp's
# `common` library (argument parsing, chat templates, its HTTP client) out of the build: nothing in the wheel loads it,
# and it is about half of the compile time. The package's CMakeLists.txt forces the cache entry ON; a normal variable of
# the same name wins over it (policies CMP0126 and CMP0077), so nothing has to be patched.
set(LLAMA_BUILD_COMMON OFF)
