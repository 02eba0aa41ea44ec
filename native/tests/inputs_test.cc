// Inputs told apart, searched and thinned out.
#include "otel_torchprof/inputs.h"

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "otel_torchprof/record_format.h"

namespace {

constexpr int64_t kOne = 1LL << 32;
constexpr int64_t kFloat = 7 << 8, kDouble = 8 << 8;
constexpr int64_t kTensor = OTP_INPUT_TENSOR | 2 * kOne;
constexpr int64_t kStrided = OTP_INPUT_STRIDED << 16;

// Rows of words, and what is asked of them.
struct Words {
  std::vector<int64_t> words;
  std::vector<int64_t> offsets;

  void add(const std::vector<int64_t>& row) {
    offsets.push_back(static_cast<int64_t>(words.size()));
    words.insert(words.end(), row.begin(), row.end());
  }
  otp_inputs get() const { return {words.data(), words.size(), offsets.data(), offsets.size()}; }

  std::vector<int32_t> number(uint32_t parts, const uint32_t* names = nullptr) const {
    std::vector<int32_t> numbers(offsets.size());
    const otp_inputs inputs = get();
    const int64_t count = otp_inputs_number(&inputs, names, parts, numbers.data());
    for (int32_t number : numbers) CHECK(number >= 0 && number < count);
    return numbers;
  }
  std::vector<uint32_t> texts(uint32_t kind) const {
    std::vector<uint32_t> ids(offsets.size());
    const otp_inputs inputs = get();
    otp_inputs_texts(&inputs, kind, ids.data());
    return ids;
  }
  Words keep(uint32_t kept) const {
    Words left{std::vector<int64_t>(words.size()), std::vector<int64_t>(offsets.size())};
    const otp_inputs inputs = get();
    std::vector<int64_t> places(words.size(), -2), again = places;
    left.words.resize(otp_inputs_keep(&inputs, kept, places.data(), left.words.data(), left.offsets.data()));
    CHECK_EQ(otp_inputs_keep(&inputs, kept, again.data(), nullptr, nullptr), left.words.size());
    return left;
  }
};

using Numbers = std::vector<int32_t>;

void rows_are_told_apart_by_what_is_asked() {
  Words rows;
  rows.add({1, kTensor | kFloat, 2, 3});
  rows.add({1, kTensor | kDouble, 2, 3});
  rows.add({1, kTensor | kFloat | kStrided, 2, 3, 1, 2});
  rows.add({2, kTensor | kFloat, 2, 3, OTP_INPUT_INT, 4});
  rows.add({2, kTensor | kFloat, 2, 3, OTP_INPUT_INT, 5});
  rows.add({2, kTensor | kFloat, 2, 3, OTP_INPUT_BOOL | kOne});
  CHECK(rows.number(OTP_PART_SHAPES) == (Numbers{0, 0, 0, 1, 1, 1}));
  CHECK(rows.number(OTP_PART_DTYPES) == (Numbers{0, 1, 0, 2, 2, 3}));
  CHECK(rows.number(OTP_PART_VALUES) == (Numbers{0, 0, 0, 1, 2, 3}));
  const std::vector<uint32_t> names{1, 1, 2, 1, 1, 1};
  CHECK(rows.number(OTP_PART_SHAPES, names.data()) == (Numbers{0, 0, 1, 2, 2, 2}));
}

// Rows that share words have one number, and share what is kept of them.
void rows_may_share_words() {
  Words rows;
  rows.add({1, OTP_INPUT_INT, 4});
  rows.add({1, kTensor | kFloat, 2, 3});
  rows.offsets = {0, 3, 0, -1, 3};
  CHECK(rows.number(OTP_PART_SHAPES | OTP_PART_VALUES) == (Numbers{0, 1, 0, 2, 1}));
  const Words left = rows.keep(OTP_KEEP_INPUTS);
  CHECK(left.words == rows.words);
  CHECK(left.offsets == rows.offsets);
  CHECK(rows.keep(OTP_KEEP_OVERLOADS).offsets == (std::vector<int64_t>(5, -1)));
}

void rows_without_inputs_are_alike() {
  Words rows;
  rows.add({0});
  rows.offsets = {-1, 0, -1};
  CHECK(rows.number(OTP_PART_SHAPES) == (Numbers{0, 1, 0}));
  CHECK(rows.texts(OTP_INPUT_OVERLOAD) == (std::vector<uint32_t>{0, 0, 0}));
}

void elements_of_lists_are_values_and_have_no_shapes() {
  Words rows;
  rows.add({2, OTP_INPUT_SCALAR_LIST | 2 * kOne, OTP_INPUT_INT, 1, OTP_INPUT_INT, 2, OTP_INPUT_OTHER});
  rows.add({2, OTP_INPUT_SCALAR_LIST | 2 * kOne, OTP_INPUT_INT, 1, OTP_INPUT_INT, 3, OTP_INPUT_OTHER});
  rows.add({2, OTP_INPUT_TENSOR_LIST | kOne, kTensor, 4, 5, OTP_INPUT_OTHER});
  CHECK(rows.number(OTP_PART_SHAPES) == (Numbers{0, 0, 0}));
  CHECK(rows.number(OTP_PART_VALUES) == (Numbers{0, 1, 2}));
}

void many_numbers_fit() {
  Words rows;
  for (int64_t i = 0; i < 100'000; ++i) rows.add({1, OTP_INPUT_INT, i});
  const Numbers numbers = rows.number(OTP_PART_VALUES);
  for (int32_t i = 0; i < 100'000; ++i) CHECK_EQ(numbers[static_cast<size_t>(i)], i);
}

// An input, a keyword, an overload, a call stack and modules.
std::vector<int64_t> everything() {
  return {1 | 4 * kOne,
          kTensor | kFloat,
          2,
          3,
          OTP_INPUT_KEYWORD | 5 * kOne,
          OTP_INPUT_INT,
          7,
          OTP_INPUT_OVERLOAD | 6 * kOne,
          OTP_INPUT_CALL_STACK | 8 * kOne,
          OTP_INPUT_MODULE_HIERARCHY | 9 * kOne};
}

void texts_are_found_behind_the_inputs() {
  Words rows;
  rows.add(everything());
  rows.add({1, OTP_INPUT_STRING | 3 * kOne});
  CHECK(rows.texts(OTP_INPUT_OVERLOAD) == (std::vector<uint32_t>{6, 0}));
  CHECK(rows.texts(OTP_INPUT_CALL_STACK) == (std::vector<uint32_t>{8, 0}));
  CHECK(rows.texts(OTP_INPUT_MODULE_HIERARCHY) == (std::vector<uint32_t>{9, 0}));
  CHECK(rows.texts(OTP_INPUT_STRING) == (std::vector<uint32_t>{0, 3}));
}

void only_what_is_requested_is_kept() {
  Words rows;
  rows.add(everything());
  rows.add({1, OTP_INPUT_INT, 4});
  CHECK(rows.keep(15).words == rows.words);
  CHECK(rows.keep(OTP_KEEP_INPUTS).words ==
        (std::vector<int64_t>{1 | kOne, kTensor | kFloat, 2, 3, OTP_INPUT_KEYWORD | 5 * kOne, OTP_INPUT_INT, 7, 1,
                              OTP_INPUT_INT, 4}));
  const Words overloads = rows.keep(OTP_KEEP_OVERLOADS);
  CHECK(overloads.words == (std::vector<int64_t>{kOne, OTP_INPUT_OVERLOAD | 6 * kOne}));
  CHECK(overloads.offsets == (std::vector<int64_t>{0, -1}));
  CHECK(rows.keep(0).words.empty());
}

constexpr int64_t kStored = OTP_INPUT_STORED << 16;

// 24 bytes on the second of some devices.
constexpr int64_t kPlace = 24 | int64_t{1} << 48 | int64_t{1} << 56;

// A tensor that is laid out in its own way, a list with one that lies nowhere, and a keyword.
Words stored() {
  Words rows;
  rows.add({2 | kOne,
            kTensor | kFloat | kStrided | kStored,
            2,
            3,
            1,
            2,
            0x1000,
            kPlace,
            OTP_INPUT_TENSOR_LIST | 2 * kOne,
            kTensor | kStored,
            4,
            5,
            0x2000,
            80,
            kTensor,
            6,
            7,
            OTP_INPUT_KEYWORD | 5 * kOne,
            kTensor | kStored,
            1,
            1,
            0x3000,
            4});
  rows.add({1, OTP_INPUT_INT, 4});
  rows.add({1, kTensor | kStored, 8, 9, 0x4000, 288});
  return rows;
}

void storages_are_listed() {
  Words rows = stored();
  rows.offsets.insert(rows.offsets.begin() + 1, -1);
  const otp_inputs inputs = rows.get();
  std::vector<otp_storage> found(otp_inputs_storages(&inputs, nullptr));
  CHECK_EQ(found.size(), size_t{3});
  CHECK_EQ(otp_inputs_storages(&inputs, found.data()), uint64_t{3});
  CHECK(found[0].address == 0x1000 && found[0].bytes == 24 && found[0].row == 0 && found[0].input == 0);
  CHECK(found[0].device_type == 1 && found[0].device_index == 1);
  CHECK(found[1].address == 0x2000 && found[1].bytes == 80 && found[1].row == 0 && found[1].input == 1);
  CHECK(found[2].address == 0x4000 && found[2].bytes == 288 && found[2].row == 3 && found[2].input == 0);
}

void storages_change_nothing_else() {
  const Words rows = stored();
  const Words plain = rows.keep(OTP_KEEP_INPUTS);
  CHECK(plain.words == (std::vector<int64_t>{2 | kOne,
                                             kTensor | kFloat | kStrided,
                                             2,
                                             3,
                                             1,
                                             2,
                                             OTP_INPUT_TENSOR_LIST | 2 * kOne,
                                             kTensor,
                                             4,
                                             5,
                                             kTensor,
                                             6,
                                             7,
                                             OTP_INPUT_KEYWORD | 5 * kOne,
                                             kTensor,
                                             1,
                                             1,
                                             1,
                                             OTP_INPUT_INT,
                                             4,
                                             1,
                                             kTensor,
                                             8,
                                             9}));
  CHECK(rows.keep(OTP_KEEP_INPUTS | OTP_KEEP_STORAGES).words == rows.words);
  CHECK(rows.keep(OTP_KEEP_STORAGES).words.empty());
  Words both = rows;
  for (size_t row = 0; row < plain.offsets.size(); ++row) {
    const auto end = row + 1 < plain.offsets.size() ? plain.words.begin() + plain.offsets[row + 1] : plain.words.end();
    both.add(std::vector<int64_t>(plain.words.begin() + plain.offsets[row], end));
  }
  for (uint32_t parts = 1; parts < 8; ++parts) {
    const Numbers numbers = both.number(parts);
    for (size_t row = 0; row < 3; ++row) CHECK_EQ(numbers[row], numbers[row + 3]);
  }
}

void words_that_lie_are_read_to_their_end_only() {
  for (const std::vector<int64_t>& words : std::vector<std::vector<int64_t>>{{},
                                                                             {-1},
                                                                             {5},
                                                                             {1, -1},
                                                                             {1, 1 | 100 * kOne, 2},
                                                                             {2, 2 | 100 * kOne, 1 | 9 * kOne},
                                                                             {7 * kOne, 9},
                                                                             {1, kTensor | kStored, 2, 3, 4},
                                                                             {1, 2 | 3 * kOne, 1 | kStored, 5},
                                                                             {1, kTensor | kStored | kStrided, 1}}) {
    Words rows;
    rows.add(words);
    for (uint32_t parts = 0; parts < 8; ++parts) rows.number(parts);
    for (uint32_t kind = 0; kind < 16; ++kind) rows.texts(kind);
    for (uint32_t kept = 0; kept < 32; ++kept) rows.keep(kept);
    const otp_inputs inputs = rows.get();
    std::vector<otp_storage> found(otp_inputs_storages(&inputs, nullptr));
    CHECK_EQ(otp_inputs_storages(&inputs, found.data()), found.size());
  }
}

void types_have_torchs_names() {
  CHECK_EQ(std::string(otp_input_type_name(kTensor | kFloat)), "float");
  CHECK_EQ(std::string(otp_input_type_name(OTP_INPUT_TENSOR)), "");
  CHECK_EQ(std::string(otp_input_type_name(OTP_INPUT_TENSOR | 255 << 8)), "");
  CHECK_EQ(std::string(otp_input_type_name(OTP_INPUT_TENSOR | (100 + 1) << 8)), "");
  otp_set_dtype_name(100, "c10::Later");
  otp_set_dtype_name(100, "c10::Another");
  otp_set_dtype_name(6, "c10::Wrong");
  otp_set_dtype_name(101, "a name of more characters than there is space for");
  otp_set_dtype_name(1'000'000, "c10::Beyond");
  CHECK_EQ(std::string(otp_input_type_name(OTP_INPUT_TENSOR | (100 + 1) << 8)), "c10::Later");
  CHECK_EQ(std::string(otp_input_type_name(OTP_INPUT_TENSOR | (101 + 1) << 8)), "");
  CHECK_EQ(std::string(otp_input_type_name(kTensor | kFloat)), "float");
  CHECK_EQ(std::string(otp_input_type_name(OTP_INPUT_OTHER)), "");
  CHECK_EQ(std::string(otp_input_type_name(OTP_INPUT_OTHER | OTP_INPUT_SYMBOLIC << 16)), "Scalar");
  CHECK_EQ(std::string(otp_input_type_name(-1)), "");
}

}  // namespace

int main() {
  RUN(rows_are_told_apart_by_what_is_asked);
  RUN(rows_may_share_words);
  RUN(rows_without_inputs_are_alike);
  RUN(elements_of_lists_are_values_and_have_no_shapes);
  RUN(many_numbers_fit);
  RUN(texts_are_found_behind_the_inputs);
  RUN(only_what_is_requested_is_kept);
  RUN(storages_are_listed);
  RUN(storages_change_nothing_else);
  RUN(words_that_lie_are_read_to_their_end_only);
  RUN(types_have_torchs_names);
  return 0;
}
