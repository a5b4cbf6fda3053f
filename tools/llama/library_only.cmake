# Included by llama.cpp's own project() (CMAKE_PROJECT_llama.cpp_INCLUDE): the package's build forces
# llama.cpp's common library on, which no program of its uses here, nor its HTTP client.
set(LLAMA_BUILD_COMMON OFF)
