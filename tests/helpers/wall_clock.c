// Preloaded into a program: a wall clock that the program can set. The system's own, and its monotonic one, stay.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <sys/time.h>
#include <time.h>

static int64_t g_ahead = 0;

void set_wall_clock_ahead(int64_t seconds) { __atomic_store_n(&g_ahead, seconds, __ATOMIC_SEQ_CST); }

int clock_gettime(clockid_t id, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*) = NULL;
  if (real == NULL) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(id, now);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += __atomic_load_n(&g_ahead, __ATOMIC_SEQ_CST);
  return status;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (out != NULL) *out = found.tv_sec;
  return found.tv_sec;
}
