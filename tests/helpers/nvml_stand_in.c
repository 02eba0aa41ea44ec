/* Stands in for NVIDIA's libnvidia-ml.so.1 where there is no GPU: answers the NVML functions that the package asks,
 * from a table.
 *
 * The table is lines of `key = value`, read from a recording (stand_in_read) and changed by a test at any time
 * (stand_in_set). A key is a card's or a MIG device's (`gpu.0.power`, `gpu.0.mig.1.uuid`), `count`, `driver`, or
 * `call.FUNCTION`. A value is a number or a text; `!15` is an error code that the function returns instead; what is not
 * in the table is answered with NVML_ERROR_NOT_SUPPORTED. Signatures and layouts are those that nvidia-ml-py passes.
 *
 * A handle is good until NVML was shut down by all who had initialised it, as in NVML. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  GPU_IS_LOST = 15
};

#define ROWS 1024
#define TEXT 128

static struct {
  char key[TEXT];
  char value[TEXT];
} table[ROWS];
static struct {
  char name[TEXT];
  unsigned calls;
} counts[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char blocked[TEXT];
static int waiting;
static int users;
static uintptr_t generation;

/* Under the lock, as all that does not say otherwise. */
static const char* look(const char* key) {
  for (int i = 0; i < ROWS; ++i) {
    if (table[i].key[0] != '\0' && strcmp(table[i].key, key) == 0) return table[i].value;
  }
  return NULL;
}

static void put(const char* key, const char* value) {
  int empty = -1;
  for (int i = 0; i < ROWS; ++i) {
    if (strcmp(table[i].key, key) == 0) {
      empty = i;
      break;
    }
    if (empty < 0 && table[i].key[0] == '\0') empty = i;
  }
  if (empty < 0) abort();
  snprintf(table[empty].key, TEXT, "%s", value == NULL ? "" : key);
  snprintf(table[empty].value, TEXT, "%s", value == NULL ? "" : value);
}

static int text(const char* key, const char** out) {
  *out = look(key);
  if (*out == NULL) return NOT_SUPPORTED;
  return (*out)[0] == '!' ? atoi(*out + 1) : SUCCESS;
}

static int number(const char* key, unsigned long long* out) {
  const char* found;
  int code = text(key, &found);
  if (code == SUCCESS) *out = strtoull(found, NULL, 0);
  return code;
}

/* What a test calls. These take the lock. */
void stand_in_set(const char* key, const char* value) {
  pthread_mutex_lock(&lock);
  put(key, value);
  pthread_mutex_unlock(&lock);
}

/* Forgets everything, then takes the lines of a file; nonzero where it cannot be opened. */
int stand_in_read(const char* path) {
  char line[2 * TEXT + 8];
  char key[TEXT];
  char value[TEXT];
  FILE* file = fopen(path, "r");
  if (file == NULL) return -1;
  pthread_mutex_lock(&lock);
  memset(table, 0, sizeof table);
  memset(counts, 0, sizeof counts);
  blocked[0] = '\0';
  users = 0;
  while (fgets(line, sizeof line, file) != NULL) {
    if (line[0] != '#' && sscanf(line, " %127[^= ] = %127[^\n]", key, value) == 2) put(key, value);
  }
  pthread_mutex_unlock(&lock);
  fclose(file);
  return 0;
}

unsigned stand_in_calls(const char* name) {
  unsigned calls = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 64; ++i) {
    if (strcmp(counts[i].name, name) == 0) calls = counts[i].calls;
  }
  pthread_mutex_unlock(&lock);
  return calls;
}

/* How many have initialised NVML and not shut it down. */
int stand_in_users(void) { return users; }

/* Calls of this function wait from now on, until another name, or none, is given. */
void stand_in_block(const char* name) {
  pthread_mutex_lock(&lock);
  snprintf(blocked, TEXT, "%s", name);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

/* Returns when a call waits. */
void stand_in_wait(void) {
  pthread_mutex_lock(&lock);
  while (waiting == 0) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

/* Every answer begins here and ends with leave(): counts, waits where it is to, and says what it is to fail with. */
static int enter(const char* name) {
  char key[TEXT];
  unsigned long long code = SUCCESS;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 64; ++i) {
    if (counts[i].name[0] == '\0') snprintf(counts[i].name, TEXT, "%s", name);
    if (strcmp(counts[i].name, name) == 0) {
      ++counts[i].calls;
      break;
    }
  }
  while (strcmp(blocked, name) == 0) {
    ++waiting;
    pthread_cond_broadcast(&changed);
    pthread_cond_wait(&changed, &lock);
    --waiting;
  }
  snprintf(key, TEXT, "call.%s", name);
  if (look(key) != NULL) return number(key, &code);
  return users == 0 && strcmp(name, "nvmlInitWithFlags") != 0 ? UNINITIALIZED : SUCCESS;
}

static int leave(int code) {
  pthread_mutex_unlock(&lock);
  return code;
}

/* A handle: which generation, which card, and which MIG device of it, counted from 1; 0 is the card. */
static void* handle_of(uintptr_t gpu, uintptr_t mig) { return (void*)(generation << 16 | gpu << 8 | mig); }

static int prefix(void* handle, char* out) {
  char lost[TEXT];
  uintptr_t bits = (uintptr_t)handle;
  if (bits >> 16 != generation || generation == 0) return INVALID_ARGUMENT;
  snprintf(lost, TEXT, "gpu.%u.lost", (unsigned)(bits >> 8 & 0xff));
  if (look(lost) != NULL) return GPU_IS_LOST;
  if ((bits & 0xff) == 0) {
    snprintf(out, TEXT, "gpu.%u", (unsigned)(bits >> 8 & 0xff));
  } else {
    snprintf(out, TEXT, "gpu.%u.mig.%u", (unsigned)(bits >> 8 & 0xff), (unsigned)(bits & 0xff) - 1);
  }
  return SUCCESS;
}

static int device_number(void* handle, const char* what, unsigned long long* out) {
  char device[TEXT];
  char key[2 * TEXT];
  int code = prefix(handle, device);
  if (code != SUCCESS) return code;
  snprintf(key, sizeof key, "%s.%s", device, what);
  return number(key, out);
}

static int answer_text(int code, const char* key, char* out, unsigned size) {
  const char* found;
  if (code == SUCCESS) code = text(key, &found);
  if (code != SUCCESS) return code;
  if (strlen(found) >= size) return INSUFFICIENT_SIZE;
  strcpy(out, found);
  return SUCCESS;
}

static int device_text(const char* function, void* handle, const char* what, char* out, unsigned size) {
  char device[TEXT];
  char key[2 * TEXT];
  int code = enter(function);
  if (code == SUCCESS) code = prefix(handle, device);
  if (code == SUCCESS) snprintf(key, sizeof key, "%s.%s", device, what);
  return leave(answer_text(code, key, out, size));
}

static int device_unsigned(const char* function, void* handle, const char* what, unsigned* out) {
  unsigned long long value = 0;
  int code = enter(function);
  if (code == SUCCESS) code = device_number(handle, what, &value);
  if (code == SUCCESS) *out = (unsigned)value;
  return leave(code);
}

/* What NVML has. */
int nvmlInitWithFlags(unsigned flags) {
  int code = enter(__func__);
  (void)flags;
  if (code == SUCCESS && users++ == 0) ++generation;
  return leave(code);
}

int nvmlShutdown(void) {
  int code = enter(__func__);
  if (code == SUCCESS) --users;
  return leave(code);
}

const char* nvmlErrorString(int code) {
  return code == 998 ? "An error that nvidia-ml-py does not know" : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  int code = enter(__func__);
  return leave(answer_text(code, "driver", out, size));
}

int nvmlDeviceGetCount_v2(unsigned* out) {
  unsigned long long value = 0;
  int code = enter(__func__);
  if (code == SUCCESS) code = number("count", &value);
  *out = (unsigned)value;
  return leave(code);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out) {
  char device[TEXT];
  unsigned long long count = 0;
  int code = enter(__func__);
  if (code == SUCCESS) code = number("count", &count);
  if (code == SUCCESS && index >= count) code = INVALID_ARGUMENT;
  *out = handle_of(index, 0);
  if (code == SUCCESS) code = prefix(*out, device);
  return leave(code);
}

int nvmlDeviceGetUUID(void* handle, char* out, unsigned size) {
  return device_text(__func__, handle, "uuid", out, size);
}
int nvmlDeviceGetName(void* handle, char* out, unsigned size) {
  return device_text(__func__, handle, "name", out, size);
}
int nvmlDeviceGetSerial(void* handle, char* out, unsigned size) {
  return device_text(__func__, handle, "serial", out, size);
}
int nvmlDeviceGetVbiosVersion(void* handle, char* out, unsigned size) {
  return device_text(__func__, handle, "vbios", out, size);
}

int nvmlDeviceGetUtilizationRates(void* handle, unsigned out[2]) {
  unsigned long long gpu = 0;
  unsigned long long memory = 0;
  int code = enter(__func__);
  if (code == SUCCESS) code = device_number(handle, "utilization", &gpu);
  if (code == SUCCESS) code = device_number(handle, "utilization.memory", &memory);
  out[0] = (unsigned)gpu;
  out[1] = (unsigned)memory;
  return leave(code);
}

int nvmlDeviceGetEncoderUtilization(void* handle, unsigned* out, unsigned* period) {
  *period = 167000;
  return device_unsigned(__func__, handle, "encoder", out);
}

int nvmlDeviceGetDecoderUtilization(void* handle, unsigned* out, unsigned* period) {
  *period = 167000;
  return device_unsigned(__func__, handle, "decoder", out);
}

/* The second version tells what the driver keeps for itself apart; the first counts it as used. */
static int memory(void* handle, unsigned long long out[4]) {
  int code = device_number(handle, "memory.total", &out[0]);
  if (code == SUCCESS) code = device_number(handle, "memory.reserved", &out[1]);
  if (code == SUCCESS) code = device_number(handle, "memory.used", &out[3]);
  out[2] = out[0] - out[1] - out[3];
  return code;
}

int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long out[3]) {
  unsigned long long all[4] = {0};
  int code = enter(__func__);
  if (code == SUCCESS) code = memory(handle, all);
  out[0] = all[0];
  out[1] = all[2];
  out[2] = all[1] + all[3];
  return leave(code);
}

struct memory_v2 {
  unsigned version;
  unsigned long long values[4];
};

int nvmlDeviceGetMemoryInfo_v2(void* handle, struct memory_v2* out) {
  int code = enter(__func__);
  if (code == SUCCESS && out->version != (sizeof *out | 2u << 24)) code = INVALID_ARGUMENT;
  if (code == SUCCESS) code = memory(handle, out->values);
  return leave(code);
}

int nvmlDeviceGetTemperature(void* handle, int sensor, unsigned* out) {
  (void)sensor;
  return device_unsigned(__func__, handle, "temperature", out);
}

struct temperature {
  unsigned version;
  unsigned sensor;
  int celsius;
};

int nvmlDeviceGetTemperatureV(void* handle, struct temperature* out) {
  if (out->version != (sizeof *out | 1u << 24)) return INVALID_ARGUMENT;
  return device_unsigned(__func__, handle, "temperature", (unsigned*)&out->celsius);
}

int nvmlDeviceGetPowerUsage(void* handle, unsigned* out) { return device_unsigned(__func__, handle, "power", out); }

int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* out) {
  int code = enter(__func__);
  if (code == SUCCESS) code = device_number(handle, "energy", out);
  return leave(code);
}

struct field {
  unsigned id;
  unsigned scope;
  long long timestamp;
  long long latency;
  unsigned type;
  int code;
  unsigned long long value;
};

int nvmlDeviceGetFieldValues(void* handle, int count, struct field* out) {
  char device[TEXT];
  char key[TEXT];
  int code = enter(__func__);
  if (code == SUCCESS) code = prefix(handle, device);
  for (int i = 0; code == SUCCESS && i < count; ++i) {
    unsigned long long type = 3;
    snprintf(key, TEXT, "field.%u", out[i].id);
    out[i].code = device_number(handle, key, &out[i].value);
    snprintf(key, TEXT, "field.%u.type", out[i].id);
    if (device_number(handle, key, &type) == SUCCESS || out[i].code == SUCCESS) out[i].type = (unsigned)type;
  }
  return leave(code);
}

int nvmlDeviceGetTotalEccErrors(void* handle, int type, int counter, unsigned long long* out) {
  char key[TEXT];
  int code = enter(__func__);
  snprintf(key, TEXT, "ecc.%s.%s", counter == 0 ? "volatile" : "aggregate", type == 0 ? "corrected" : "uncorrected");
  if (code == SUCCESS) code = device_number(handle, key, out);
  return leave(code);
}

int nvmlDeviceGetRemappedRows(void* handle, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                              unsigned* failed) {
  unsigned long long values[4] = {0};
  int code = enter(__func__);
  if (code == SUCCESS) code = device_number(handle, "rows.corrected", &values[0]);
  if (code == SUCCESS) code = device_number(handle, "rows.uncorrected", &values[1]);
  if (code == SUCCESS) code = device_number(handle, "rows.pending", &values[2]);
  if (code == SUCCESS) code = device_number(handle, "rows.failed", &values[3]);
  *corrected = (unsigned)values[0];
  *uncorrected = (unsigned)values[1];
  *pending = (unsigned)values[2];
  *failed = (unsigned)values[3];
  return leave(code);
}

int nvmlDeviceGetRetiredPagesPendingStatus(void* handle, unsigned* out) {
  return device_unsigned(__func__, handle, "pages.pending", out);
}

int nvmlDeviceGetMigMode(void* handle, unsigned* current, unsigned* pending) {
  int code = device_unsigned(__func__, handle, "mig", current);
  *pending = *current;
  return code;
}

int nvmlDeviceGetMaxMigDeviceCount(void* handle, unsigned* out) {
  return device_unsigned(__func__, handle, "mig.max", out);
}

int nvmlDeviceGetMigDeviceHandleByIndex(void* handle, unsigned index, void** out) {
  char device[TEXT];
  char key[2 * TEXT];
  int code = enter(__func__);
  if (code == SUCCESS) code = prefix(handle, device);
  if (code == SUCCESS) {
    snprintf(key, sizeof key, "%s.mig.%u.uuid", device, index);
    if (look(key) == NULL) code = NOT_FOUND;
  }
  *out = handle_of((uintptr_t)handle >> 8 & 0xff, index + 1);
  return leave(code);
}

int nvmlDeviceGetGpuInstanceId(void* handle, unsigned* out) { return device_unsigned(__func__, handle, "gi", out); }
int nvmlDeviceGetComputeInstanceId(void* handle, unsigned* out) { return device_unsigned(__func__, handle, "ci", out); }
