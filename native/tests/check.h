// What the C++ tests need: a check that says where it failed and stops, and a line per test that passed.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

#define CHECK_EQ(actual, expected)                                                                \
  do {                                                                                            \
    if (!((actual) == (expected))) {                                                              \
      std::fprintf(stderr, "%s:%d: not equal: %s, %s\n", __FILE__, __LINE__, #actual, #expected); \
      std::abort();                                                                               \
    }                                                                                             \
  } while (false)

#define RUN(test)                      \
  do {                                 \
    test();                            \
    std::printf("passed %s\n", #test); \
  } while (false)
