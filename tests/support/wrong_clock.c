/* Replaces the wall clock by one that is $CLOCK_OFFSET_S seconds ahead. Clocks that measure durations stay right. Not replaced: waits
 * until an absolute wall-clock time, the times of files, timespec_get. (libfaketime 0.9.10 cannot do that: with
 * FAKETIME_DONT_FAKE_MONOTONIC every clock_nanosleep fails.)
 *
 *     cc -shared -fPIC -o wrong_clock.so wrong_clock.c && LD_PRELOAD=./wrong_clock.so CLOCK_OFFSET_S=3600 date
 */

#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t offset;

/* Once: getenv beside a setenv of another thread may read freed memory. */
__attribute__((constructor)) static void read_offset(void) {
  const char *seconds = getenv("CLOCK_OFFSET_S");
  offset = seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int error = (int)syscall(SYS_clock_gettime, clock, now);
  if (!error && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset;
  return error;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int error = (int)syscall(SYS_gettimeofday, now, zone);
  if (!error) now->tv_sec += offset;
  return error;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
