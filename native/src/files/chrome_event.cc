#include "files/chrome_event.h"

namespace otp {
namespace {

// A member of the arguments that is used as text.
struct Wanted {
  std::string_view key;
  std::string_view ChromeArguments::* place;
};

constexpr Wanted kWanted[] = {
    {"External id", &ChromeArguments::external_id},
    {"external id", &ChromeArguments::external_id},  // Kineto until 2022
    {"Sequence number", &ChromeArguments::sequence_nr},
    {"Fwd thread id", &ChromeArguments::fwd_thread},
    {"Python identity", &ChromeArguments::python_identity},
    {"correlation", &ChromeArguments::correlation},
    {"device", &ChromeArguments::device},
    {"stream", &ChromeArguments::stream},
    {"stream id", &ChromeArguments::stream_id},  // of this package
    {"name", &ChromeArguments::name},
    {"labels", &ChromeArguments::labels},
    {"error.type", &ChromeArguments::error_type},
    {"Call stack", &ChromeArguments::call_stack},
    {"Module Hierarchy", &ChromeArguments::modules},
    {"bytes", &ChromeArguments::bytes},
    {"Bytes", &ChromeArguments::bytes},
    {"Addr", &ChromeArguments::address},
    {"Total Allocated", &ChromeArguments::total_allocated},
    {"Total Reserved", &ChromeArguments::total_reserved},
    {"Device Id", &ChromeArguments::device_id},
    {"Device Type", &ChromeArguments::device_type},
    {"span_id", &ChromeArguments::span_id},
    {"parent_id", &ChromeArguments::parent_id},
    {"trace_id", &ChromeArguments::trace_id},
    {"data", &ChromeArguments::data},
};

// Those of the attributes of a span of this package.
constexpr Wanted kAttributes[] = {
    {"thread.id", &ChromeArguments::thread_id},
    {"torch.op.sequence_nr", &ChromeArguments::sequence_nr},
    {"torch.op.forward_thread", &ChromeArguments::fwd_thread},
    {"torch.phase.name", &ChromeArguments::phase_name},
    {"torch.module", &ChromeArguments::module},
    {"error.type", &ChromeArguments::error_type},
    {"torch.memory.allocated", &ChromeArguments::allocated},
    {"torch.memory.released", &ChromeArguments::released},
    {"torch.memory.peak", &ChromeArguments::peak},
    {"torch.device.memory.allocated", &ChromeArguments::device_allocated},
    {"torch.device.memory.released", &ChromeArguments::device_released},
    {"torch.device.memory.peak", &ChromeArguments::device_peak},
};

struct WantedList {
  std::string_view key;
  std::string_view InputTexts::* place;
};

constexpr WantedList kLists[] = {
    {"Input type", &InputTexts::types},
    {"Input Dims", &InputTexts::dims},
    {"Input dims", &InputTexts::dims},
    {"Input Strides", &InputTexts::strides},
    {"Concrete Inputs", &InputTexts::values},
    {"torch.op.input_dtypes", &InputTexts::types},
    {"torch.op.input_shapes", &InputTexts::dims},
    {"torch.op.concrete_inputs", &InputTexts::values},
};

struct WantedFlag {
  std::string_view key;
  bool ChromeArguments::* place;
};

constexpr WantedFlag kFlags[] = {
    {"async", &ChromeArguments::is_async},           {"unfinished", &ChromeArguments::is_unfinished},
    {"lost before", &ChromeArguments::follows_loss}, {"inputs cut", &ChromeArguments::has_inputs_cut},
    {"torch.async", &ChromeArguments::is_async},     {"torch.unfinished", &ChromeArguments::is_unfinished},
};

// Whether it is one of these.
template <size_t N>
bool stored(const Wanted (&all)[N], std::string_view key, std::string_view value, ChromeArguments* arguments) {
  for (const Wanted& wanted : all) {
    if (wanted.key != key) continue;
    arguments->*wanted.place = value;
    return true;
  }
  return false;
}

void store(std::string_view key, std::string_view value, ChromeArguments* arguments) {
  for (const WantedList& wanted : kLists) {
    if (wanted.key != key) continue;
    arguments->inputs.*wanted.place = value;
    return;
  }
  for (const WantedFlag& wanted : kFlags)
    if (wanted.key == key) arguments->*wanted.place = value == "true";
}

// The attributes of a span that are wanted.
struct Attributes {
  TraceTables* tables;
  FoundAttributes* found;

  void find(std::string_view key, std::string_view value) {
    if (const int64_t name = tables->wanted(key); name >= 0) found->emplace_back(static_cast<uint32_t>(name), value);
  }
};

// Those of torch's events of collectives. By size, which is known while compiling: every argument of every event comes
// here.
bool is_of_collective(std::string_view key) {
  switch (key.size()) {
    case 3:
      return key == "Seq";
    case 15:
      return key == "Collective name";
    case 18:
      return key == "Process Group Name";
    default:
      return key.size() == 19 && key == "Process Group Ranks";
  }
}

// The cursor is at the brace of an object, and then behind it. `of_span`: the attributes of a span, which are an object
// among its arguments; an object in these is passed over.
template <bool of_span>
bool read_arguments(JsonCursor* cursor, ChromeArguments* arguments, Attributes* attributes) {
  for (++cursor->at; cursor->space_and_commas();) {
    if (*cursor->at == '}') {
      ++cursor->at;
      return true;
    }
    std::string_view key;
    if (!cursor->key(&key)) return false;
    const char* begin = cursor->at;
    if (!of_span && key == "attributes" && *begin == '{') {
      if (!read_arguments<true>(cursor, arguments, attributes)) return false;
      continue;
    }
    if (!cursor->skip()) return false;
    const std::string_view value(begin, static_cast<size_t>(cursor->at - begin));
    if (!(of_span ? stored(kAttributes, key, value, arguments) : stored(kWanted, key, value, arguments)))
      store(key, value, arguments);
    if (of_span || key == "attributes") attributes->find(key, value);
    if (!of_span && attributes->tables->is_for_sums() && is_of_collective(key)) {
      attributes->found->emplace_back(attributes->tables->name(key), value);
      arguments->is_collective |= key == "Collective name";
    }
  }
  return false;
}

}  // namespace

std::string_view* ChromeEvent::place_of(std::string_view key) {
  switch (key.size()) {
    case 2:
      return key == "ph" ? &phase : key == "ts" ? &start : key == "id" ? &id : nullptr;
    case 3:
      if (key == "pid") return &process;
      if (key == "tid") return &thread;
      if (key == "dur") return &duration;
      if (key == "cat") return &category;
      return key == "id2" ? &local_id : nullptr;
    default:
      return key == "name" ? &name : nullptr;
  }
}

bool ChromeEvent::read(JsonCursor* cursor, TraceTables* tables, FoundAttributes* found) {
  Attributes attributes{tables, found};
  for (++cursor->at; cursor->space_and_commas();) {
    if (*cursor->at == '}') {
      ++cursor->at;
      return true;
    }
    std::string_view key;
    if (!cursor->key(&key)) return false;
    const char* begin = cursor->at;
    if (key == "args" && *begin == '{') {
      if (!read_arguments<false>(cursor, &arguments, &attributes)) return false;
      continue;
    }
    if (!cursor->skip()) return false;
    const std::string_view value(begin, static_cast<size_t>(cursor->at - begin));
    if (key == "args") arguments.is_unusable = value != "null";
    if (std::string_view* place = place_of(key)) *place = value;
  }
  return false;
}

}  // namespace otp
