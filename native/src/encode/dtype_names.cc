#include "encode/dtype_names.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "otel_torchprof/inputs.h"

namespace otp {
namespace {

// By c10::ScalarType: the names of the C++ types, as GCC has them.
constexpr const char* kDtypes[] = {
    "unsigned char",            // uint8
    "signed char",              // int8
    "short int",                // int16
    "int",                      // int32
    "long int",                 // int64
    "c10::Half",                // float16
    "float",                    // float32
    "double",                   // float64
    "c10::complex<c10::Half>",  // complex32
    "c10::complex<float>",      // complex64
    "c10::complex<double>",     // complex128
    "bool",
    "c10::qint8",
    "c10::quint8",
    "c10::qint32",
    "c10::BFloat16",
    "c10::quint4x2",
    "c10::quint2x4",
    "c10::bits1x8",
    "c10::bits2x4",
    "c10::bits4x2",
    "c10::bits8",
    "c10::bits16",
    "c10::Float8_e5m2",
    "c10::Float8_e4m3fn",
    "c10::Float8_e5m2fnuz",
    "c10::Float8_e4m3fnuz",
    "short unsigned int",  // uint16
    "unsigned int",        // uint32
    "long unsigned int",   // uint64
    "c10::dummy_uint1_7_t<1>",
    "c10::dummy_uint1_7_t<2>",
    "c10::dummy_uint1_7_t<3>",
    "c10::dummy_uint1_7_t<4>",
    "c10::dummy_uint1_7_t<5>",
    "c10::dummy_uint1_7_t<6>",
    "c10::dummy_uint1_7_t<7>",
    "c10::dummy_int1_7_t<1>",
    "c10::dummy_int1_7_t<2>",
    "c10::dummy_int1_7_t<3>",
    "c10::dummy_int1_7_t<4>",
    "c10::dummy_int1_7_t<5>",
    "c10::dummy_int1_7_t<6>",
    "c10::dummy_int1_7_t<7>",
    "c10::Float8_e8m0fnu",
    "c10::Float4_e2m1fn_x2",
    "c10::complex<c10::BFloat16>",  // bcomplex32
};
constexpr uint32_t kDtypeCount = sizeof(kDtypes) / sizeof(kDtypes[0]);
constexpr uint32_t kMostDtypes = 128;
// Of types that a later torch has; never freed, since names are handed out.
std::atomic<const char*> g_later[kMostDtypes - kDtypeCount];

const char* dtype_name(uint32_t number) {
  if (number < kDtypeCount) return kDtypes[number];
  const char* later = number < kMostDtypes ? g_later[number - kDtypeCount].load(std::memory_order_acquire) : nullptr;
  return later == nullptr ? "" : later;
}

}  // namespace

const char* type_name(const InputHead& head) {
  switch (head.kind) {
    case OTP_INPUT_TENSOR:
      return head.dtype == 0 ? "" : dtype_name(head.dtype - 1);
    case OTP_INPUT_TENSOR_LIST:
      return "TensorList";
    case OTP_INPUT_SCALAR_LIST:
      return "ScalarList";
    case OTP_INPUT_INT:
    case OTP_INPUT_DOUBLE:
    case OTP_INPUT_BOOL:
    case OTP_INPUT_COMPLEX:
      return "Scalar";
    case OTP_INPUT_OTHER:
      return (head.flags & OTP_INPUT_SYMBOLIC) != 0 ? "Scalar" : "";
    default:
      return "";
  }
}

}  // namespace otp

extern "C" void otp_set_dtype_name(uint32_t number, const char* name) {
  if (number < otp::kDtypeCount || number >= otp::kMostDtypes || std::strlen(name) > otp::kMaxTypeNameSize) return;
  const char* copy = strdup(name);
  const char* expected = nullptr;
  if (!otp::g_later[number - otp::kDtypeCount].compare_exchange_strong(expected, copy))
    std::free(const_cast<char*>(copy));
}

extern "C" const char* otp_input_type_name(int64_t header) { return otp::type_name(otp::InputHead::of(header)); }
