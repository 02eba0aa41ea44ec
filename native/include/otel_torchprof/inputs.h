/* Inputs of events, as words (otp_input_kind in record_format.h): told apart, searched and thinned out.
 *
 * Words are read up to their end and never beyond, whatever they say; an offset below 0 is a row without any. See
 * encode.h for ownership and threads.
 */
#ifndef OTEL_TORCHPROF_INPUTS_H_
#define OTEL_TORCHPROF_INPUTS_H_

#include "otel_torchprof/encode.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What of the inputs counts when two rows are compared. */
enum otp_input_part {
  OTP_PART_SHAPES = 1, /* sizes of tensors; all that is no tensor is alike */
  OTP_PART_DTYPES = 2, /* what each is, and the dtype of a tensor */
  OTP_PART_VALUES = 4, /* what each is, and the value of a scalar */
};

/* What otp_inputs_keep leaves. */
enum otp_input_kept {
  OTP_KEEP_INPUTS = 1, /* inputs and keyword inputs */
  OTP_KEEP_OVERLOADS = 2,
  OTP_KEEP_CALL_STACKS = 4,
  OTP_KEEP_MODULE_HIERARCHY = 8,
  OTP_KEEP_STORAGES = 16, /* with the inputs, the storages of tensors */
};

typedef struct {
  const int64_t* words;
  uint64_t word_count;
  const int64_t* offsets; /* one per row */
  uint64_t row_count;
} otp_inputs;

/* Numbers the rows from 0, in the order in which they come, so that rows with equal parts (otp_input_part) and, unless
 * `names` is null, equal names have the same number; rows without inputs are alike. Parts are compared by a hash of 64
 * bits. Writes row_count numbers; returns how many there are, or -1 when memory is short. Linear in the words; takes up
 * to 48 bytes per number. */
int64_t otp_inputs_number(const otp_inputs* inputs, const uint32_t* names, uint32_t parts, int32_t* numbers);

/* For each row, the id in the first extra of a kind (otp_input_kind), or for OTP_INPUT_STRING in the first input of
 * that kind; 0 where there is none. */
void otp_inputs_texts(const otp_inputs* inputs, uint32_t kind, uint32_t* ids);

/* Copies what is to be kept (bits of otp_input_kept) to `words`, which has room for as many as there are, and writes
 * where each row's then begin to `offsets`: -1 where nothing is left. Rows that shared words still do; words may
 * overlap in no other way. Both null: counts only. `places` has room for one number per word, all -2. Returns the
 * number of words. */
uint64_t otp_inputs_keep(const otp_inputs* inputs, uint32_t kept, int64_t* places, int64_t* words, int64_t* offsets);

/* A storage that a row's inputs are in. */
typedef struct {
  uint64_t address;
  uint64_t bytes;
  int64_t row;
  int32_t input; /* which of the inputs, from 0: a list is one */
  uint8_t device_type;
  uint8_t device_index;
  uint16_t reserved;
} otp_storage;

/* Writes the storages of tensors among the inputs, those of a list too, by row and then as they stand; keywords have
 * none. `storages` null: counts only. Returns how many there are. */
uint64_t otp_inputs_storages(const otp_inputs* inputs, otp_storage* storages);

/* What torch's profiler calls the type of an input with this header (a word of otp_input_kind): "float", "Scalar",
 * "TensorList"; static memory. */
const char* otp_input_type_name(int64_t header);

/* Names a type of a torch that is newer than this library's table: the number is a c10::ScalarType. Of a type that has
 * a name, and of what is no number of one, nothing changes. From any thread. */
void otp_set_dtype_name(uint32_t number, const char* name);

#ifdef __cplusplus
}
#endif
#endif /* OTEL_TORCHPROF_INPUTS_H_ */
