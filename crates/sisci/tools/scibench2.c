/*
 * scibench2: how fast the CPU moves bytes to another host's memory (PIO), or from it. The server
 * owns a segment; the client writes to it, size after size, and prints what one transfer took.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

/* Transfers of a row, unless -loops says so; fewer where they are large. */
enum { LOOPS = 40000, LOOPS_AT_LEAST = 16 };
static const size_t BYTES_OF_A_ROW = 512UL << 20;

static size_t size = 64 << 10;
static unsigned int loops;
static int pull;
static const char *copy_mode = "s";

static struct option options[] = {
    {"-size", OPTION_SIZE, &size, "BYTES", "server: the segment; client: the last row (64K)"},
    {"-loops", OPTION_NUMBER, &loops, "NUMBER", "transfers of each row (40000, fewer if large)"},
    {"-copymode", OPTION_TEXT, &copy_mode, "s|m|d",
     "by SCIMemCpy (s), by memcpy (m), by single stores or loads (d)"},
    {"-pull", OPTION_FLAG, &pull, NULL, "read instead of write"},
    {NULL, OPTION_FLAG, NULL, NULL, NULL},
};

static const struct program program = {
    "scibench2",
    "bandwidth of stores to another host's memory",
    "  rackbus on beta -- scibench2 -rn alpha -server -size 8M\n"
    "  rackbus on alpha -- scibench2 -rn beta -client -size 8M -copymode m\n",
    options,
    1,
    1,
};

/* One way of moving bytes between memory and the peer's segment. */
typedef void (*copy_function)(struct peer_segment *peer, void *memory, size_t bytes);

static void copy_sisci(struct peer_segment *peer, void *memory, size_t bytes)
{
    sci_error_t error;
    SCIMemCpy(peer->sequence, memory, peer->map, 0, bytes, pull ? SCI_FLAG_BLOCK_READ : 0, &error);
    check(error, "cannot copy %lu bytes", (unsigned long)bytes);
}

static void copy_memcpy(struct peer_segment *peer, void *memory, size_t bytes)
{
    /* The map is memory; the flush afterwards keeps the compiler from leaving a copy out. */
    if (pull)
        memcpy(memory, (const void *)peer->bytes, bytes);
    else
        memcpy((void *)peer->bytes, memory, bytes);
}

static void copy_direct(struct peer_segment *peer, void *memory, size_t bytes)
{
    volatile uint32_t *remote = (volatile uint32_t *)peer->bytes;
    uint32_t *local = (uint32_t *)memory;
    size_t i;
    for (i = 0; i < bytes / sizeof *local; i++) {
        if (pull)
            local[i] = remote[i];
        else
            remote[i] = local[i];
    }
}

static copy_function find_copy(void)
{
    switch (copy_mode[1] == '\0' ? copy_mode[0] : '\0') {
    case 's':
        return copy_sisci;
    case 'm':
        return copy_memcpy;
    case 'd':
        return copy_direct;
    default:
        usage_error("-copymode is s, m or d, not '%s'", copy_mode);
    }
}

static void print_header(copy_function copy)
{
    if (copy == copy_sisci)
        printf("Function: sciMemCopy_OS_COPY_Prefetch (%d)\n", GetSciMemCopyFunction());
    else
        printf("Function: %s\n", copy == copy_memcpy ? "memcpy" : "direct");
    printf("---------------------------------------------------------------\n");
    printf("%-18s %-24s %s\n", "Segment Size:",
           pull ? "Average Read Latency:" : "Average Send Latency:", "Throughput:");
    printf("---------------------------------------------------------------\n");
}

static void measure(const struct session *session, struct peer_segment *peer, copy_function copy,
                    void *memory, size_t bytes)
{
    double begun, each;
    unsigned int i, count = loops;
    if (count == 0) {
        count = bytes > BYTES_OF_A_ROW / LOOPS ? (unsigned int)(BYTES_OF_A_ROW / bytes) : LOOPS;
        if (count < LOOPS_AT_LEAST)
            count = LOOPS_AT_LEAST;
    }
    copy(peer, memory, bytes); /* what is touched first has to be found first */
    begun = now();
    for (i = 0; i < count; i++) {
        copy(peer, memory, bytes);
        SCIFlush(peer->sequence, 0);
    }
    each = (now() - begun) / count;
    peer_check(peer);
    printf("%-18lu %10.2f us %20.2f MBytes/s\n", (unsigned long)bytes, each, (double)bytes / each);
    if (session->json)
        printf("{\"tool\":\"scibench2\",\"copy\":\"%s\",\"direction\":\"%s\",\"bytes\":%lu,"
               "\"loops\":%u,\"us\":%.4f,\"mbytes_per_s\":%.2f}\n",
               copy_mode, pull ? "pull" : "push", (unsigned long)bytes, count, each,
               (double)bytes / each);
}

static void client(const struct session *session)
{
    copy_function copy = find_copy();
    struct peer_segment peer;
    size_t bytes;
    void *memory;
    peer_connect(&peer, session, session->id);
    if (size > peer.size)
        size = peer.size;
    memory = calloc(1, size);
    if (memory == NULL)
        fail(SCI_ERR_OK, "no memory for %lu bytes", (unsigned long)size);
    SetSciMemCopyFunction(5);
    print_header(copy);
    for (bytes = 4; bytes <= size; bytes *= 2)
        measure(session, &peer, copy, memory, bytes);
    free(memory);
    peer_disconnect(&peer);
}

static void server(const struct session *session)
{
    struct own_segment own;
    own_create(&own, session, session->id, size);
    printf("Segment 0x%x of %lu bytes is available to node %u\n", session->id, (unsigned long)size,
           session->remote);
    own_wait_until_left(&own, session);
    own_remove(&own);
}

int main(int argc, char **argv)
{
    struct session session;
    read_options(&program, argc, argv);
    if (size < 4)
        usage_error("-size is at least 4 bytes");
    session_open(&session);
    if (session.client)
        client(&session);
    else
        server(&session);
    session_close(&session);
    return EXIT_DONE;
}
