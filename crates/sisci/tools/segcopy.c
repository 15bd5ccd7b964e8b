/*
 * segcopy: copies a file to another host through shared memory, as an example of how SISCI
 * programs work.
 *
 * The server owns a segment with a ring of slots and receives; the client stores each part of the
 * file into the next free slot and then says how far it is. Each side polls only its own memory,
 * as loads from another host are slow where stores are fast: the client's progress is stored into
 * the server's segment, the server's into the client's.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

enum { SLOTS = 8, SLOT_BYTES = 64 << 10 };

/* The server's segment. Counts only grow and may wrap. */
struct ring {
    uint32_t filled; /* slots that the client has filled */
    uint32_t length[SLOTS];
    unsigned char unused[4096 - 4 - 4 * SLOTS];
    unsigned char slot[SLOTS][SLOT_BYTES];
};

/* The client's segment. */
struct progress {
    uint32_t emptied; /* slots that the server has taken */
    uint32_t check;   /* the server's check sum, once it has all */
    uint32_t finished;
};

static const char *path;

static struct option options[] = {
    {"-file", OPTION_TEXT, &path, "PATH", "client: the file to send; server: where it goes"},
    {NULL, OPTION_FLAG, NULL, NULL, NULL},
};

static const struct program program = {
    "segcopy",
    "copies a file to another host through a segment",
    "  rackbus on beta -- segcopy -rn alpha -server -file /tmp/copy\n"
    "  rackbus on alpha -- segcopy -rn beta -client -file /etc/services\n",
    options,
    1,
    5,
};

/* A check sum that sees bytes in the wrong order, too (FNV-1a). */
static uint32_t add_to_check(uint32_t check_sum, const unsigned char *bytes, size_t length)
{
    size_t i;
    for (i = 0; i < length; i++)
        check_sum = (check_sum ^ bytes[i]) * 16777619U;
    return check_sum;
}
static const uint32_t CHECK_OF_NOTHING = 2166136261U;

static FILE *open_file(const char *mode)
{
    FILE *file = fopen(path, mode);
    if (file == NULL)
        fail(SCI_ERR_OK, "cannot open %s: %s", path, strerror(errno));
    return file;
}

static void report(const struct session *session, unsigned long long total, double microseconds)
{
    printf("%s %llu bytes in %.3f ms, %.2f MBytes/s\n", session->client ? "Sent" : "Received",
           total, microseconds / 1e3, (double)total / microseconds);
    if (session->json)
        printf("{\"tool\":\"segcopy\",\"role\":\"%s\",\"bytes\":%llu,\"us\":%.1f}\n",
               session->client ? "client" : "server", total, microseconds);
}

static void client(const struct session *session)
{
    static unsigned char part[SLOT_BYTES];
    struct own_segment own;
    struct peer_segment peer;
    volatile struct progress *progress;
    volatile struct ring *ring;
    uint32_t filled = 0, check_sum = CHECK_OF_NOTHING;
    unsigned long long total = 0;
    size_t length;
    double begun;
    FILE *file = open_file("rb");
    own_create(&own, session, session->id + 1, 4096);
    peer_connect(&peer, session, session->id);
    if (peer.size != sizeof *ring)
        fail(SCI_ERR_OK, "segment 0x%x is not segcopy's", session->id);
    progress = (volatile struct progress *)own.bytes;
    ring = (volatile struct ring *)peer.bytes;
    begun = now();
    do {
        length = fread(part, 1, sizeof part, file);
        if (ferror(file))
            fail(SCI_ERR_OK, "cannot read %s: %s", path, strerror(errno));
        check_sum = add_to_check(check_sum, part, length);
        wait_for_change(session, &progress->emptied, filled - SLOTS); /* all slots are full */
        memcpy((void *)ring->slot[filled % SLOTS], part, length);
        ring->length[filled % SLOTS] = (uint32_t)length; /* 0 ends the file */
        store_word(&ring->filled, ++filled);
        peer_check(&peer);
        total += length;
    } while (length != 0);
    wait_for_word(session, &progress->finished, 1);
    if (progress->check != check_sum)
        fail(SCI_ERR_TRANSFER_FAILED, "the copy is not like the file");
    report(session, total, now() - begun);
    fclose(file);
    peer_disconnect(&peer);
    own_wait_until_left(&own, session);
    own_remove(&own);
}

static void server(const struct session *session)
{
    static unsigned char part[SLOT_BYTES];
    struct own_segment own;
    struct peer_segment peer;
    volatile struct progress *progress;
    volatile struct ring *ring;
    uint32_t emptied = 0, check_sum = CHECK_OF_NOTHING, length;
    unsigned long long total = 0;
    double begun;
    FILE *file = open_file("wb");
    own_create(&own, session, session->id, sizeof *ring);
    peer_connect(&peer, session, session->id + 1);
    ring = (volatile struct ring *)own.bytes;
    progress = (volatile struct progress *)peer.bytes;
    begun = now();
    do {
        wait_for_change(session, &ring->filled, emptied); /* all slots are empty */
        length = ring->length[emptied % SLOTS]; /* read once: it is the client's to write */
        if (length > SLOT_BYTES)
            fail(SCI_ERR_OK, "the client says that %lu bytes are in a slot", (unsigned long)length);
        memcpy(part, (const void *)ring->slot[emptied % SLOTS], length);
        store_word(&progress->emptied, ++emptied);
        check_sum = add_to_check(check_sum, part, length);
        if (fwrite(part, 1, length, file) != length)
            fail(SCI_ERR_OK, "cannot write %s: %s", path, strerror(errno));
        total += length;
    } while (length != 0);
    if (fclose(file) != 0)
        fail(SCI_ERR_OK, "cannot write %s: %s", path, strerror(errno));
    progress->check = check_sum;
    store_word(&progress->finished, 1);
    peer_check(&peer);
    report(session, total, now() - begun);
    peer_disconnect(&peer);
    own_wait_until_left(&own, session);
    own_remove(&own);
}

int main(int argc, char **argv)
{
    struct session session;
    read_options(&program, argc, argv);
    if (path == NULL)
        usage_error("say with -file which file");
    session_open(&session);
    if (session.client)
        client(&session);
    else
        server(&session);
    session_close(&session);
    return EXIT_DONE;
}
