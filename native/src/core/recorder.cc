// The recording threads' side: begin and end, as fast as we know how.
#include "core/recording.h"

namespace otp {

namespace {

// Of the library of operators: sessions that torch carries to this thread.
std::atomic<uint32_t (*)()> g_scope_hook{nullptr};

void append_loss_mark(ThreadBuffer& thread, uint32_t consumers) {
  thread.append(otp_record{1, OTP_RECORD_LOSS, 0, static_cast<uint16_t>(consumers), 0});
  thread.loss_pending &= ~consumers;
}

void append_context(ThreadBuffer& thread, uint32_t consumers) {
  thread.append(otp_record{0, OTP_RECORD_CONTEXT, 0, static_cast<uint16_t>(consumers), thread.context});
  thread.context_pending &= ~consumers;
}

// The sessions that request this thread. A hook is asked only when a session is running that is not known to request
// it: with one profile, on the thread that started it, never.
inline uint32_t requesting(const ThreadBuffer& thread, uint32_t active, uint32_t scope_mask) {
  uint32_t requested = (known_scope(thread) | scope_mask) & active;
  if (__builtin_expect(requested == active, 1)) return requested;
  auto* hook = g_scope_hook.load(std::memory_order_relaxed);
  return hook == nullptr ? requested : (requested | hook()) & active;
}

constexpr uint32_t kMaxInputWords = (Chunk::kCapacity - hot::kBeginBytes - sizeof(otp_record)) / sizeof(int64_t);

// Inputs that no chunk could hold are left out whole: half a list of shapes would be a wrong one.
inline uint32_t words_kept(const otp_begin_args& args) {
  return args.input_words <= kMaxInputWords ? args.input_words : 0;
}

inline uint32_t input_bytes(const otp_begin_args& args) {
  if (__builtin_expect(args.input_words == 0, 1)) return 0;
  return static_cast<uint32_t>(sizeof(otp_record) + words_kept(args) * sizeof(int64_t));
}

// The INPUTS record. Returns its bytes.
__attribute__((noinline)) uint32_t copy_inputs(uint8_t* place, const otp_begin_args& args, uint32_t consumers) {
  uint32_t words = words_kept(args);
  auto flags = static_cast<uint8_t>(words == args.input_words ? args.flags & OTP_FLAG_INPUTS_CUT : OTP_FLAG_INPUTS_CUT);
  auto* record = reinterpret_cast<otp_record*>(place);
  record->ticks = words;
  hot::write_head(record, OTP_RECORD_INPUTS, flags, consumers, 0);
  if (words != 0) std::memcpy(record + 1, args.inputs, words * sizeof(int64_t));
  return input_bytes(args);
}

// Events that nobody has ended, and whose sessions no longer run, go when they fill the stack: what a program forgets
// to end in each of a thousand profiles must not end the recording of its thread. False: there are none.
OTP_COLD bool drop_forgotten(ThreadBuffer& thread) {
  uint32_t before = thread.depth.get();
  for (uint32_t i = before; i-- > 0;)
    if ((thread.open[i].consumers.get() & g_shared.running()) == 0) thread.remove_open(static_cast<int>(i));
  return thread.depth.get() < before;
}

// Which of the sessions can have a record of this size now, with what has to stand before it written.
OTP_COLD uint32_t room_slowpath(ThreadBuffer& thread, uint32_t requested, uint32_t bytes) {
  uint32_t consumers = requested & thread.accepted;
  if (consumers != requested || !thread.fits(bytes) || !is_current(thread))
    consumers = make_room_slowpath(thread, requested, bytes, true);
  if ((thread.loss_pending & consumers) != 0) append_loss_mark(thread, thread.loss_pending & consumers);
  thread.context_pending &= g_shared.follows.load(std::memory_order_relaxed);  // a bit's last owner may have followed
  if ((thread.context_pending & consumers) != 0) append_context(thread, thread.context_pending & consumers);
  thread.not_ready = ~(thread.accepted & known_scope(thread)) | thread.loss_pending | thread.context_pending |
                     g_requests_devices.load(std::memory_order_relaxed);
  return consumers;
}

inline uint64_t id_of(const ThreadBuffer& thread, uint64_t index) {
  return static_cast<uint64_t>(thread.id) << OTP_INDEX_BITS | (index + 1);
}

// Here, before the event's own time is taken: what a mark costs is then outside of the event, and so is that of its
// end.
OTP_COLD uint32_t mark_begin(const ThreadBuffer& thread, const otp_begin_args& args, uint32_t consumers) {
  consumers &= g_requests_devices.load(std::memory_order_relaxed);
  const otp_device_source* source = g_device_source.load(std::memory_order_acquire);
  if (consumers == 0 || source == nullptr || args.kind == OTP_EVENT_FRAME) return 0;
  return source->begin(id_of(thread, thread.next_index.get()), &args, consumers) != 0 ? kMarked : 0;
}

OTP_COLD void mark_end(const ThreadBuffer& thread, const OpenEvent& event) {
  const otp_device_source* source = g_device_source.load(std::memory_order_acquire);
  if (source != nullptr) source->end(id_of(thread, event.index.get()));
}

inline std::string_view text_of(const char* text, uint32_t size) {
  return size == UINT32_MAX ? std::string_view(text) : std::string_view(text, size);
}

OTP_COLD otp_name_kind name_kind(const otp_begin_args& args) {
  constexpr uint8_t kUserScope = 7;  // at::RecordScope: what torch's own labels have, and modules too
  if (args.kind == OTP_EVENT_LABEL) return OTP_NAME_LABEL;
  if (args.kind == OTP_EVENT_PHASE) return OTP_NAME_OPERATOR;
  if (args.kind != OTP_EVENT_OPERATOR) return OTP_NAME_CODE;
  return args.scope == kUserScope ? OTP_NAME_LABEL : OTP_NAME_OPERATOR;
}

__attribute__((noinline)) uint32_t name_slowpath(ThreadBuffer& thread, const otp_begin_args& args) {
  uint32_t id;
  std::string_view name = text_of(args.name, args.name_size);
  if (!thread.names.find(name, &id)) id = thread.names.ask(registry().interner, name, name_kind(args));
  uint32_t generation = args.name_generation;
  if (generation == 0 || thread.addresses.is_unstable(args.name, generation)) return id;
  int stable = args.name_is_stable(args.key);
  if (stable > 0) thread.addresses.keep(args.name, generation, id);
  if (stable < 0) thread.addresses.keep_unstable(args.name, generation);
  return id;
}

// For recorder_hot.h.
struct Event {
  ThreadBuffer& thread;
  const otp_begin_args& args;

  const void* key() const { return args.key; }
  uint8_t scope() const { return args.scope; }
  uint8_t kind() const { return args.kind; }
  bool nests() const { return args.nests != 0; }
  int64_t sequence_nr() const { return args.sequence_nr; }
  uint32_t fwd_thread() const { return args.fwd_thread; }
  uint32_t source_tid() const { return args.source_tid; }
  bool name(hot::Thread&, uint32_t* id) const {
    *id = args.name_size;
    uint32_t generation = args.name_generation;
    bool known = args.name == nullptr || (generation != 0 && thread.addresses.find(args.name, generation, id));
    if (!known) *id = name_slowpath(thread, args);
    return true;
  }
  uint32_t inputs(uint8_t* place, uint32_t, uint32_t consumers) const {
    return __builtin_expect(args.input_words == 0, 1) ? 0 : copy_inputs(place, args, consumers);
  }
  uint64_t now() const { return ticks_now(); }
};

// Begins an event of a thread that is not ready for all sessions that run.
OTP_COLD uint32_t begin_slowpath(ThreadBuffer& thread, const otp_begin_args& args, uint32_t active) {
  uint32_t requested = requesting(thread, active, args.scope_mask);
  if (requested == 0) return 0;
  repair_stack(thread);
  Event event{thread, args};
  if (hot::is_second_call(thread, event, thread.depth.get())) return 0;
  if (thread.depth.get() >= OTP_MAX_DEPTH && !drop_forgotten(thread)) {
    count_too_deep(thread, requested, args);
    return 0;
  }
  uint32_t consumers = room_slowpath(thread, requested, hot::kBeginBytes + input_bytes(args));
  uint32_t marked = mark_begin(thread, args, consumers), depth = thread.depth.get();
  uint64_t visible = thread.visible_parent(depth), index = thread.next_index.get();
  hot::open(thread, event, depth, index, consumers | marked, thread.at);
  if (consumers == 0) return thread.id;
  uint32_t name;
  event.name(thread, &name);
  auto* record = reinterpret_cast<otp_record_begin*>(hot::place_of(thread.chunk, thread.at));
  hot::write_begin(record, event, index, consumers, name, visible);
  uint32_t written = event.inputs(reinterpret_cast<uint8_t*>(record + 1), 0, consumers);
  record->head.ticks = args.ticks == 0 ? ticks_now() : after_all(thread, args.ticks);
  thread.next_index.set(index + 1);
  thread.publish(thread.at + static_cast<uint32_t>(sizeof *record) + written);
  return thread.id;
}

// The sessions that request what begins here, of those that request its kind, where the context may be another one.
__attribute__((noinline)) uint32_t ask_for_context(ThreadBuffer& thread, uint32_t active, const otp_begin_args& args) {
  repair_stack(thread);
  if (hot::may_have_other_context(thread, hot::what_is(args.scope, args.kind))) {
    const otp_context_source* source = g_shared.context_source.load(std::memory_order_acquire);
    if (!refresh_context_slowpath(thread, source, source == nullptr ? 0 : source->version())) return 0;
    active = g_shared.active[args.kind].load(std::memory_order_acquire) & ~args.not_for;  // asking took its time
  }
  if (g_shared.follow_epoch.load(std::memory_order_acquire) != thread.context_epoch) note_followers_slowpath(thread);
  return hot::in_known_context(thread, g_shared, hot::what_is(args.scope, args.kind), active);
}

}  // namespace

OTP_HOT uint32_t begin(const otp_begin_args* args) {
  // Acquire, which is free on x86: who sees a session's bit must see the epoch that came with it, or could take what it
  // remembers of the bit's last owner for the new one's.
  uint32_t active = g_shared.active[args->kind].load(std::memory_order_acquire) & ~args->not_for;
  if (active == 0) return 0;
  ThreadBuffer* thread = this_thread();
  if (thread == nullptr) return 0;
  uint32_t sessions = active;
  if (__builtin_expect(!hot::in_context(*thread, g_shared, hot::what_is(args->scope, args->kind), &sessions), 0))
    sessions = ask_for_context(*thread, active, *args);
  if (sessions == 0) return 0;
  if (__builtin_expect(args->ticks == 0, 1)) {
    hot::Begun begun =
        hot::begin(*thread, g_shared, Event{*thread, *args}, sessions, thread->not_ready, input_bytes(*args));
    if (__builtin_expect(begun != hot::Begun::kUnusual, 1)) return begun == hot::Begun::kRecorded ? thread->id : 0;
  }
  return begin_slowpath(*thread, *args, sessions);
}

namespace {

// Writes the end of an event of this thread, whatever has changed since its begin.
OTP_COLD void write_end_slowpath(ThreadBuffer& thread, const OpenEvent& event, uint64_t ticks, uint8_t flags,
                                 uint32_t error) {
  uint32_t consumers = event.consumers.get() & g_shared.running();
  if (consumers == 0) return;
  uint64_t distance = thread.next_index.get() - event.index.get();
  bool is_long = error != 0 || distance > UINT32_MAX;
  uint32_t bytes = is_long ? sizeof(otp_record_error_end) : sizeof(otp_record);
  uint32_t here = consumers & thread.accepted;
  if (here != consumers || !thread.fits(bytes)) here = make_room_slowpath(thread, consumers, bytes, false);
  if (here != 0) {
    otp_record head{ticks, OTP_RECORD_END, flags, static_cast<uint16_t>(here), static_cast<uint32_t>(distance)};
    if (is_long) {
      head.kind = OTP_RECORD_ERROR_END;
      head.value = error;
      thread.append(otp_record_error_end{head, distance});
    } else {
      thread.append(head);
    }
    thread.publish(thread.at);
  }
  if (here != consumers) end_late_slowpath(thread, consumers & ~here, event.index.get(), ticks, flags, error);
}

}  // namespace

OTP_COLD int end_slowpath(ThreadBuffer& thread, const void* key, uint64_t ticks, uint8_t flags, const char* error_type,
                          uint32_t error_type_size) {
  repair_stack(thread);
  if (key == thread.too_deep) thread.too_deep = nullptr;
  OpenEvent event;
  if (!take_open(thread, key, &event) && !take_suspended(thread, key, &event)) return 0;
  // Before it is written: who drains an end finds its mark, too.
  if ((event.consumers.get() & kMarked) != 0) mark_end(thread, event);
  write_end_slowpath(thread, event, ticks, flags, intern_error(error_type, error_type_size));
  return 1;
}

namespace {

// Where no event is on the stack: whether there is none elsewhere either that could end. Then the end is that of an
// event that no session requested, such as all those of a muted context.
inline bool is_idle(const ThreadBuffer& thread) {
  return thread.suspended_count.load(std::memory_order_relaxed) == 0 && thread.too_deep == nullptr;
}

}  // namespace

OTP_HOT int end(const void* key, uint8_t flags, const char* error_type, uint32_t error_type_size) {
  ThreadBuffer* thread = t_buffer;
  if (thread == nullptr) return 0;
  uint32_t depth = thread->depth.get();
  if (depth == 0 && is_idle(*thread)) return 0;
  uint64_t ticks = ticks_now();
  if (__builtin_expect(error_type == nullptr && hot::end(*thread, g_shared, key, flags, thread->not_ready, ticks), 1))
    return 1;
  // As every operator of a step that is left out, inside a phase that is not.
  if (is_idle(*thread) && thread->find_open(key) < 0) return 0;
  return end_slowpath(*thread, key, ticks, flags, error_type, error_type_size);
}

namespace {

uint64_t ticks() { return ticks_now(); }

OTP_COLD uint32_t memory_slowpath(ThreadBuffer& thread, uint32_t active, uint32_t scope_mask, uint32_t bytes) {
  uint32_t requested = requesting(thread, active, scope_mask);
  if (requested == 0) return 0;
  repair_stack(thread);
  return room_slowpath(thread, requested, bytes);
}

int memory(const otp_memory_args* args) {
  uint32_t consumers = g_shared.requests_memory.load(std::memory_order_acquire);
  ThreadBuffer* thread = consumers == 0 ? nullptr : this_thread();
  if (thread == nullptr) return 0;
  bool ready = hot::is_ready(*thread, g_shared, consumers & thread->not_ready, hot::kMemoryBytes);
  if (__builtin_expect(!ready, 0)) consumers = memory_slowpath(*thread, consumers, args->scope_mask, hot::kMemoryBytes);
  if (consumers == 0) return 0;
  if (__builtin_expect(thread->source_tid.get() == 0, 0)) thread->source_tid.set(args->source_tid);
  hot::write_memory(*thread, *args, consumers, g_clock_is_tsc);
  return 1;
}

uint32_t intern(const char* text, uint32_t size, uint32_t kind) {
  ThreadBuffer* thread = this_thread();
  if (thread == nullptr) return 0;
  uint32_t id;
  std::string_view name = text_of(text, size);
  return thread->names.find(name, &id) ? id
                                       : thread->names.ask(registry().interner, name, static_cast<otp_name_kind>(kind));
}

void set_scope_hook(uint32_t (*hook)()) { g_scope_hook.store(hook, std::memory_order_release); }

void set_context_source(const otp_context_source* source) {
  g_shared.context_source.store(source, std::memory_order_release);
  g_shared.follow_epoch.fetch_add(1, std::memory_order_release);
}

void set_context_carrier(const otp_context_carrier* carrier) {
  g_context_carrier.store(carrier, std::memory_order_release);
}

void set_device_source(const otp_device_source* source) { g_device_source.store(source, std::memory_order_release); }

void set_mute_hook(void (*hook)()) { g_mute_hook.store(hook, std::memory_order_release); }

int64_t unix_ns(uint64_t ticks) { return registry().clock.unix_ns(ticks == 0 ? ticks_now() : ticks); }

uint64_t innermost(uint32_t* consumers) {
  ThreadBuffer* thread = t_buffer;
  if (thread == nullptr) return 0;
  repair_stack(*thread);
  uint32_t depth = thread->depth.get();
  if (depth == 0) return 0;
  const OpenEvent& top = thread->open[depth - 1];
  *consumers = top.consumers.get() & g_shared.running();
  return *consumers == 0 ? 0 : id_of(*thread, top.index.get());
}

void* buffer() { return static_cast<hot::Thread*>(t_buffer); }

// Where t_buffer is from the thread pointer on: on every thread the same, since it is initial-exec.
int64_t buffer_at() {
#if defined(__x86_64__) && defined(__ELF__)
  const char* thread_pointer;
  __asm__("movq %%fs:0, %0" : "=r"(thread_pointer));
  return reinterpret_cast<const char*>(&t_buffer) - thread_pointer;
#else
  return 0;
#endif
}

// The atomics are lock-free words: a library of C or of another compiler may look at them as such.
const volatile uint32_t* as_word(const std::atomic<uint32_t>& value) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free, "");
  return reinterpret_cast<const volatile uint32_t*>(&value);
}

}  // namespace
}  // namespace otp

extern "C" const otp_api* otp_get_api(void) {
  static const otp_api api = {
      OTP_ABI_VERSION,
      OTP_RECORD_FORMAT_VERSION,
      otp::as_word(otp::g_shared.active[0]),
      otp::as_word(otp::g_shared.requests_inputs),
      otp::begin,
      otp::end,
      otp::begin_frame,
      otp::end_frame,
      otp::end_frames,
      otp::ticks,
      otp::end_elsewhere,
      otp::suspend,
      otp::resume,
      otp::memory,
      otp::intern,
      otp::set_scope_hook,
      otp::set_context_source,
      otp::set_context_carrier,
      otp::set_device_source,
      otp::unix_ns,
      otp::innermost,
      otp::mute_roots,
      otp::set_mute_hook,
      otp::as_word(otp::g_box_is_open),
      otp::collective_enqueued,
      otp::collective_completed,
      {otp::hot::kLayout, &otp::g_shared, otp::buffer_at(), otp::buffer, otp::g_clock_is_tsc ? 1u : 0u}};
  return &api;
}
