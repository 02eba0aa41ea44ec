// Stands in for torch's own, by which the headers of c10d include the 2,600 headers of all operators: 5 s of compiling.
// These are the operators that they use.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
