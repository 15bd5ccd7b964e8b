/*
 * reflective: one store, every host's memory. Each program has a segment of the same multicast
 * group; what the client stores to the group arrives in all of them. The servers check what came
 * and answer through the group as well; the client prints how long it takes until all have
 * answered.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

enum { RANKS = 256, PAYLOAD = 4096 };

/*
 * The start of each member's segment; the payload comes PAYLOAD bytes behind the segment's start. A
 * group may still have what an earlier run left: so each run has a number of its own, which its
 * rounds count from.
 */
struct board {
    uint32_t run;           /* the client knows all servers, and the next two say what comes */
    uint32_t loops;
    uint32_t largest;
    uint32_t round;         /* of the payload that is there */
    uint32_t here[RANKS];   /* server k of the group is there */
    uint32_t answer[RANKS]; /* the round that server k has seen */
};

static unsigned int nodes;
static unsigned int rank;
static unsigned int group;
static unsigned int loops = 1000;
static size_t size = 64 << 10;

static struct option options[] = {
    {"-nodes", OPTION_NUMBER, &nodes, "NUMBER", "client: how many servers there are, up to 255"},
    {"-rank", OPTION_NUMBER, &rank, "NUMBER", "server: which one it is, from 1"},
    {"-group", OPTION_NUMBER, &group, "NUMBER", "multicast group, the same on all sides (0)"},
    {"-size", OPTION_SIZE, &size, "BYTES", "the largest transfer, the same on all sides (64K)"},
    {"-loops", OPTION_NUMBER, &loops, "NUMBER", "client: transfers of each size (1000)"},
    {NULL, OPTION_FLAG, NULL, NULL, NULL},
};

static const struct program program = {
    "reflective",
    "multicast: one store arrives in the memory of many hosts",
    "  rackbus on beta -- reflective -server -rank 1\n"
    "  rackbus on gamma -- reflective -server -rank 2\n"
    "  rackbus on alpha -- reflective -client -nodes 2 -size 1M\n",
    options,
    0,
    6,
};

/* The own copy of the group's memory, and the way to everybody's. */
struct member {
    const struct session *session;
    struct own_segment own;
    struct peer_segment all;
    volatile struct board *mine;
    volatile struct board *everybodys;
};

static void join(struct member *member, const struct session *session)
{
    sci_error_t error;
    member->session = session;
    member->own.size = PAYLOAD + size;
    SCICreateSegment(session->sd, &member->own.segment, group, member->own.size, NULL, NULL,
                     SCI_FLAG_BROADCAST, &error);
    check(error, "cannot join group %u", group);
    SCIPrepareSegment(member->own.segment, session->adapter, SCI_FLAG_BROADCAST, &error);
    check(error, "cannot prepare the segment of group %u", group);
    member->own.bytes = (volatile unsigned char *)SCIMapLocalSegment(
        member->own.segment, &member->own.map, 0, member->own.size, NULL, 0, &error);
    check(error, "cannot map the segment of group %u", group);
    SCISetSegmentAvailable(member->own.segment, session->adapter, 0, &error);
    check(error, "cannot make the segment of group %u available", group);
    member->mine = (volatile struct board *)member->own.bytes;
}

static void connect_to_all(struct member *member)
{
    const struct session *session = member->session;
    double since = now();
    sci_error_t error;
    do {
        SCIConnectSegment(session->sd, &member->all.segment, DIS_BROADCAST_NODEID_GROUP_ALL, group,
                          session->adapter, NULL, NULL, 0, SCI_FLAG_BROADCAST, &error);
    } while (error != SCI_ERR_OK && try_again(session, error, since));
    check(error, "cannot connect to group %u", group);
    member->all.bytes = (volatile unsigned char *)SCIMapRemoteSegment(
        member->all.segment, &member->all.map, 0, member->own.size, NULL, SCI_FLAG_BROADCAST,
        &error);
    check(error, "cannot map group %u", group);
    SCICreateMapSequence(member->all.map, &member->all.sequence, 0, &error);
    check(error, "cannot make a sequence for group %u", group);
    member->everybodys = (volatile struct board *)member->all.bytes;
}

/* The byte that round has everywhere, but for its place in the payload. */
static unsigned char byte_of(uint32_t round, size_t place)
{
    return (unsigned char)(round * 7 + place);
}

static void measure(struct member *member, uint32_t *round, size_t bytes)
{
    unsigned char *payload = (unsigned char *)malloc(bytes + 256);
    double begun = now(), each;
    unsigned int i, server;
    size_t place;
    if (payload == NULL)
        fail(SCI_ERR_OK, "no memory for %lu bytes", (unsigned long)bytes);
    for (place = 0; place < bytes + 256; place++)
        payload[place] = byte_of(0, place);
    for (i = 0; i < loops; i++) {
        ++*round;
        memcpy((void *)(member->all.bytes + PAYLOAD), payload + byte_of(*round, 0), bytes);
        SCIFlush(member->all.sequence, 0); /* the payload first, also on other machines */
        store_word(&member->everybodys->round, *round);
        SCIFlush(member->all.sequence, 0);
        for (server = 1; server <= nodes; server++)
            wait_for_word(member->session, &member->mine->answer[server], *round);
    }
    each = (now() - begun) / loops;
    peer_check(&member->all);
    free(payload);
    printf("%10lu %14.2f us %14.2f MBytes/s to each of %u\n", (unsigned long)bytes, each,
           (double)bytes / each, nodes);
    if (member->session->json)
        printf("{\"tool\":\"reflective\",\"bytes\":%lu,\"nodes\":%u,\"loops\":%u,\"us\":%.4f,"
               "\"mbytes_per_s\":%.2f}\n",
               (unsigned long)bytes, nodes, loops, each, (double)bytes / each);
}

static void client(struct member *member)
{
    uint32_t round = (uint32_t)(uint64_t)now() | 1;
    unsigned int server;
    size_t bytes;
    store_word(&member->everybodys->run, 0);
    for (server = 1; server <= nodes; server++)
        store_word(&member->everybodys->here[server], 0);
    for (server = 1; server <= nodes; server++)
        wait_for_word(member->session, &member->mine->here[server], 1);
    member->everybodys->loops = loops;
    member->everybodys->largest = (uint32_t)size;
    SCIFlush(member->all.sequence, 0);
    store_word(&member->everybodys->run, round);
    printf("%10s %17s %23s\n", "Bytes", "Answered after", "Throughput");
    for (bytes = 4; bytes <= size; bytes *= 2)
        measure(member, &round, bytes);
}

static void answer_rounds(struct member *member, uint32_t *round, unsigned int count, size_t bytes)
{
    volatile unsigned char *payload = member->own.bytes + PAYLOAD;
    unsigned int i;
    size_t place;
    for (i = 0; i < count; i++) {
        ++*round;
        wait_for_word(member->session, &member->mine->round, *round);
        for (place = 0; place < bytes; place++)
            if (payload[place] != byte_of(*round, place))
                fail(SCI_ERR_TRANSFER_FAILED, "byte %lu of round %u is wrong", (unsigned long)place,
                     *round);
        store_word(&member->everybodys->answer[rank], *round);
        SCIFlush(member->all.sequence, 0);
    }
}

static void server(struct member *member)
{
    uint32_t before = load_word(&member->mine->run), answered = 0, round, count, largest;
    double since = now();
    size_t bytes;
    /* Who joins a group does not see what was stored before: say it until the client has heard. */
    while ((round = load_word(&member->mine->run)) == 0 || round == before) {
        store_word(&member->everybodys->here[rank], 1);
        if (!try_again(member->session, SCI_ERR_TIMEOUT, since))
            fail(SCI_ERR_TIMEOUT, "no client came to group %u", group);
    }
    count = member->mine->loops;
    largest = member->mine->largest; /* read once: it is the client's to write */
    if (largest > size)
        fail(SCI_ERR_OK, "the client asks for %lu bytes, start with -size %lu",
             (unsigned long)largest, (unsigned long)largest);
    for (bytes = 4; bytes <= largest; bytes *= 2, answered += count)
        answer_rounds(member, &round, count, bytes);
    peer_check(&member->all);
    printf("Checked %u transfers\n", answered);
}

int main(int argc, char **argv)
{
    struct session session;
    struct member member;
    read_options(&program, argc, argv);
    if (nodes >= RANKS || rank >= RANKS || (nodes == 0) == (rank == 0))
        usage_error("-client takes -nodes, -server takes -rank, 1 to %d", RANKS - 1);
    if (size < 4 || size > 1UL << 31 || loops == 0)
        usage_error("-size is 4 bytes to 2G, -loops at least 1");
    session_open(&session);
    if ((session.client != 0) != (nodes != 0))
        usage_error("-client takes -nodes, -server takes -rank");
    join(&member, &session);
    connect_to_all(&member);
    if (session.client)
        client(&member);
    else
        server(&member);
    peer_disconnect(&member.all);
    own_remove(&member.own);
    session_close(&session);
    return EXIT_DONE;
}
