/* See scenario.h. */
#define _POSIX_C_SOURCE 200809L

#include "scenario.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 32, BOARD_BYTES = (SLOTS + 1) * 4, PATIENCE_S = 180 };

#ifdef __SANITIZE_THREAD__
unsigned int scenario_order;
#endif

/* The boards' ids: the two processes may be on one host, and other scenarios at the same time. */
static unsigned int board_id(unsigned int owner_node, unsigned int peer_node, int owners)
{
    return 0x57000000U | owner_node << 16 | peer_node << 8 | (owners ? 1U : 0U);
}

void scenario_fail(const char *file, int line, const char *format, ...)
{
    va_list arguments;
    printf("%s:%d: ", file, line);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    fflush(stdout);
    /* At once: callbacks may fail too, and what is left is the library's to clean up. */
    _exit(1);
}

void scenario_expect(const char *file, int line, const char *call, sci_error_t got,
                  sci_error_t wanted)
{
    if (got != wanted)
        scenario_fail(file, line, "%s answers 0x%x (%s) instead of 0x%x (%s)", call,
                   (unsigned int)got, got == NOT_SET ? "nothing" : SCIGetErrorString(got),
                   (unsigned int)wanted, SCIGetErrorString(wanted));
}

int scenario_between_machines(void)
{
    return getenv("SCENARIO_MACHINES") != NULL;
}

void scenario_pause(void)
{
    struct timespec moment;
    moment.tv_sec = 0;
    moment.tv_nsec = 100000;
    nanosleep(&moment, NULL);
}

static void find_other(struct scenario *scenario)
{
    unsigned int owner = scenario->owner ? scenario->local : scenario->peer;
    unsigned int peer = scenario->owner ? scenario->peer : scenario->local;
    TRY(SCICreateSegment(scenario->sd, &scenario->board, board_id(owner, peer, scenario->owner),
                         BOARD_BYTES, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(scenario->board, 0, 0, &error));
    TRY(scenario->heard = (volatile uint32_t *)SCIMapLocalSegment(
            scenario->board, &scenario->board_map, 0, BOARD_BYTES, NULL, 0, &error));
    TRY(SCISetSegmentAvailable(scenario->board, 0, 0, &error));
    do {
        error = NOT_SET;
        CALLING();
        SCIConnectSegment(scenario->sd, &scenario->other_board, scenario->peer,
                          board_id(owner, peer, !scenario->owner), 0, NULL, NULL, 0, 0, &error);
        if (error == SCI_ERR_OK)
            break;
        /* Machines meet here for the first time: where many processes keep them busy, the handshake of their nodes may
           exceed its time limit. */
        if (error != SCI_ERR_NODE_NOT_RESPONDING || !scenario_between_machines())
            scenario_expect(__FILE__, __LINE__, "SCIConnectSegment", error,
                            SCI_ERR_NO_SUCH_SEGMENT);
        scenario_pause();
    } while (1);
    TRY(scenario->sent = (volatile uint32_t *)SCIMapRemoteSegment(
            scenario->other_board, &scenario->other_map, 0, BOARD_BYTES, NULL, 0, &error));
}

void scenario_begin(struct scenario *scenario, int argc, char **argv)
{
    memset(scenario, 0, sizeof *scenario);
    alarm(PATIENCE_S); /* a scenario that hangs has failed */
    scenario->alone = argc == 1;
    if (!scenario->alone) {
        if (argc != 3 || (strcmp(argv[1], "owner") != 0 && strcmp(argv[1], "peer") != 0)) {
            fprintf(stderr, "usage: %s [owner|peer NODE_ID_OF_THE_OTHER]\n", argv[0]);
            exit(2);
        }
        scenario->owner = strcmp(argv[1], "owner") == 0;
        scenario->peer = (unsigned int)strtoul(argv[2], NULL, 0);
    }
    TRY(SCIInitialize(0, &error));
    TRY(SCIGetLocalNodeId(0, &scenario->local, 0, &error));
    TRY(SCIOpen(&scenario->sd, 0, &error));
    if (scenario->alone)
        scenario->peer = scenario->local;
    else
        find_other(scenario);
}

void scenario_end(struct scenario *scenario)
{
    if (!scenario->alone) {
        scenario_meet(scenario);
        TRY(SCIUnmapSegment(scenario->other_map, 0, &error));
        TRY(SCIDisconnectSegment(scenario->other_board, 0, &error));
        TRY(SCIUnmapSegment(scenario->board_map, 0, &error));
        TRY(SCIRemoveSegment(scenario->board, 0, &error));
    }
    TRY(SCIClose(scenario->sd, 0, &error));
    SCITerminate();
}

void scenario_meet(struct scenario *scenario)
{
    scenario->step++;
    CALLING(); /* what the other one does next may lead to callbacks, too */
    __atomic_store_n(&scenario->sent[SLOTS], scenario->step, __ATOMIC_SEQ_CST);
    /* The other one may be a step ahead, as it need not wait for what comes after a meeting. */
    while (__atomic_load_n(&scenario->heard[SLOTS], __ATOMIC_SEQ_CST) < scenario->step) {
        sci_error_t ignored, status;
        if (SCIWaitForRemoteSegmentEvent(scenario->other_board, &status, 0, 0, &ignored) ==
                SCI_CB_LOST &&
            ignored == SCI_ERR_OK)
            scenario_fail(__FILE__, __LINE__, "the other process ended");
        scenario_pause();
    }
}

void scenario_send(struct scenario *scenario, unsigned int slot, uint32_t value)
{
    scenario->sent[slot] = value;
    scenario_meet(scenario);
}

uint32_t scenario_receive(struct scenario *scenario, unsigned int slot)
{
    scenario_meet(scenario);
    return scenario->heard[slot];
}
