/*
 * What the conformance tests share. A test is a program that runs one scenario: alone, or as two
 * processes, "owner" and "peer", on two hosts (or on one), each of which is given the node id of
 * the other.
 *
 * segments owner 8 on the host with node id 4 segments peer 4 on the host with node id 8
 *
 * It ends with 0, or prints what failed and ends with 1. Both processes go through the same steps:
 * they meet between them, so that none has to sleep or guess.
 */
#ifndef SCENARIO_H
#define SCENARIO_H

#include <stdint.h>

#include "sisci_api.h"

/* Milliseconds in which what was caused must have come. */
#define SOON 30000U

struct scenario {
    int alone;
    int owner;
    unsigned int local; /* node ids; alone, both are this host's */
    unsigned int peer;
    sci_desc_t sd;
    /* Where the other process says how far it is, and where this one does. */
    sci_local_segment_t board;
    sci_map_t board_map;
    volatile uint32_t *heard;
    sci_remote_segment_t other_board;
    sci_map_t other_map;
    volatile uint32_t *sent;
    uint32_t step;
};

/* Reads the roles, initialises, opens a descriptor, and finds the other process. */
void scenario_begin(struct scenario *scenario, int argc, char **argv);
/* Removes what scenario_begin made; fails if the descriptor still has something else. */
void scenario_end(struct scenario *scenario);
/* Waits until the other process is here, too. All stores made before are seen after it. */
void scenario_meet(struct scenario *scenario);
/* Sends the other process a number; receives the number that it sent. Slots are 0 to 31. */
void scenario_send(struct scenario *scenario, unsigned int slot, uint32_t value);
uint32_t scenario_receive(struct scenario *scenario, unsigned int slot);

/* Whether the two hosts are machines of their own (SCENARIO_MACHINES is set). */
int scenario_between_machines(void);

/* Fails the scenario: prints where and what, and ends the process. */
void scenario_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
void scenario_expect(const char *file, int line, const char *call, sci_error_t got,
                  sci_error_t wanted);

/* An error as it is before a call: no call may leave it so. */
#define NOT_SET ((sci_error_t)0x3fffffff)

/* The call's last parameter is &error, of this file. */
static sci_error_t error = NOT_SET;

/*
 * What a program did before a call is done when a callback comes that the call leads to. In a
 * library that is built without it, ThreadSanitizer cannot see that, so it is told: by the macros
 * for calls below, and by callbacks, which begin with CALLED.
 */
#ifdef __SANITIZE_THREAD__
extern unsigned int scenario_order;
#define CALLING() ((void)__atomic_add_fetch(&scenario_order, 1, __ATOMIC_RELEASE))
#define CALLED() ((void)__atomic_load_n(&scenario_order, __ATOMIC_ACQUIRE))
#else
#define CALLING() ((void)0)
#define CALLED() ((void)0)
#endif

/* The call succeeds. */
#define TRY(call)                                                 \
    do {                                                          \
        error = NOT_SET;                                          \
        CALLING();                                                \
        call;                                                     \
        scenario_expect(__FILE__, __LINE__, #call, error, SCI_ERR_OK); \
    } while (0)

/* The call is refused with that error. */
#define REFUSED(wanted, call)                                   \
    do {                                                        \
        error = NOT_SET;                                        \
        CALLING();                                              \
        call;                                                   \
        scenario_expect(__FILE__, __LINE__, #call, error, wanted); \
    } while (0)

/* The call is refused, with whatever error. */
#define REFUSED_SOMEHOW(call)                                                          \
    do {                                                                               \
        error = NOT_SET;                                                               \
        CALLING();                                                                     \
        call;                                                                          \
        if (error == SCI_ERR_OK || error == NOT_SET)                                   \
            scenario_fail(__FILE__, __LINE__, "%s answers 0x%x, no error", #call,         \
                       (unsigned int)error);                                           \
    } while (0)

/* The call succeeds in the end; until then it is refused with that error. */
#define POLL(refusal, call)                                     \
    do {                                                        \
        error = NOT_SET;                                        \
        CALLING();                                              \
        call;                                                   \
        if (error == SCI_ERR_OK)                                \
            break;                                              \
        scenario_expect(__FILE__, __LINE__, #call, error, refusal); \
        scenario_pause();                                          \
    } while (1)

#define CHECK(condition)                                               \
    do {                                                               \
        if (!(condition))                                              \
            scenario_fail(__FILE__, __LINE__, "not so: %s", #condition);  \
    } while (0)

/* Waits until something is so that another thread or host brings about. */
#define AWAIT(condition)     \
    do {                     \
        while (!(condition)) \
            scenario_pause();   \
    } while (0)

/* Lets others run for a moment. */
void scenario_pause(void);

#endif
