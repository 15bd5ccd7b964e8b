/* The stop watch of SISCI's test programs. Link with demolib.a. */
#ifndef TESTLIB_H
#define TESTLIB_H

#ifdef __cplusplus
extern "C" {
#endif

/* When a watch was started, on a clock that never goes back. */
typedef struct {
    long seconds;
    long nanoseconds;
} timer_start_t;

void StartTimer(timer_start_t *start);

/* Microseconds since then. */
double StopTimer(timer_start_t start);

#ifdef __cplusplus
}
#endif

#endif
