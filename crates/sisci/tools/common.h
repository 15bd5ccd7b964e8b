/*
 * What the tools share: options as SISCI programs have them, errors that say what was tried, and a
 * session with one peer: segments on both sides, found by polling, so that either side may be
 * started first.
 */
#ifndef COMMON_H
#define COMMON_H

#include <stdint.h>

#include "sisci_api.h"

/* Exit codes: all went well, something failed, the program was called wrongly. */
enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

enum option_kind {
    OPTION_FLAG,   /* int: set to 1 */
    OPTION_NUMBER, /* unsigned int */
    OPTION_SIZE,   /* size_t, in bytes; K, M, G for powers of 1024 */
    OPTION_TEXT    /* const char * */
};

struct option {
    const char *name; /* with its dash; NULL ends a list */
    enum option_kind kind;
    void *value; /* of the kind's type; keeps its value if the option is not given */
    const char *argument;
    const char *help;
};

struct program {
    const char *name;
    const char *about;
    const char *examples;
    struct option *options;
    int one_peer;         /* whether -rn says who the peer is */
    unsigned char number; /* part of its ids, so that tools may run side by side */
};

/* What -rn, -client, -server, -a, -id, -wait and -json say, and what is open. */
struct session {
    int client;
    int json;
    unsigned int adapter;
    unsigned int local;  /* node ids */
    unsigned int remote;
    unsigned int id;     /* of segments and interrupts: the first of a few numbers */
    double patience;     /* seconds to wait for the peer; 0: for ever */
    sci_desc_t sd;
};

/* A segment of this side, mapped, available to the peer. */
struct own_segment {
    sci_local_segment_t segment;
    sci_map_t map;
    volatile unsigned char *bytes;
    size_t size;
};

/* A segment of the peer's, connected and mapped. */
struct peer_segment {
    sci_remote_segment_t segment;
    sci_map_t map;
    sci_sequence_t sequence;
    volatile unsigned char *bytes;
    size_t size;
};

/* Reads the options; ends the program on -help and on mistakes. First of all. */
void read_options(const struct program *program, int argc, char **argv);
/* Readies the library and finds the peer. */
void session_open(struct session *session);
void session_close(struct session *session);

/* Ends the program: with usage, or with what failed, and why if error is not SCI_ERR_OK. */
void usage_error(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
void fail(sci_error_t error, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));
/* The same if error is one. */
void check(sci_error_t error, const char *format, ...) __attribute__((format(printf, 2, 3)));

void own_create(struct own_segment *own, const struct session *session, unsigned int id,
                size_t size);
/* Waits until a peer that connected has left again. */
void own_wait_until_left(struct own_segment *own, const struct session *session);
void own_remove(struct own_segment *own);

void peer_connect(struct peer_segment *peer, const struct session *session, unsigned int id);
/* Fails if stores so far may not have arrived. */
void peer_check(struct peer_segment *peer);
void peer_disconnect(struct peer_segment *peer);

/*
 * Whether to try again after error: sleeps a moment, and is 0 for errors that will not pass, and
 * when the session's patience, counted from since, is over.
 */
int try_again(const struct session *session, sci_error_t error, double since);

/* Words that both sides poll. A load sees all that was stored before the store it sees. */
uint32_t load_word(const volatile void *address);
void store_word(volatile void *address, uint32_t value);
/* Spins until the word has that value; fails when the session's patience is over. */
void wait_for_word(const struct session *session, const volatile void *address, uint32_t value);
/* Spins until it has another, which is returned: for words that may pass a value unseen. */
uint32_t wait_for_change(const struct session *session, const volatile void *address,
                         uint32_t value);

/* Microseconds on a clock that never goes back. */
double now(void);

#endif
