/*
 * scipp: how long a store takes to another host's memory. Both sides own a segment and write to
 * the other's in turn (ping-pong). The last four bytes of a message are a mark that the receiver
 * polls for in its own memory; half a round trip is printed.
 */
#include <stdio.h>
#include <string.h>

#include "common.h"

/*
 * What the client tells the server, at the start of the server's segment; messages come behind it.
 */
struct plan {
    uint32_t go;
    uint32_t loops;
    uint32_t smallest;
    uint32_t largest;
};
enum { MESSAGES = 4096, LARGEST = 64 << 10, WARM_UP = 100 };

static size_t size = 8192;
static unsigned int loops = 10000;
static int histogram;

static struct option options[] = {
    {"-size", OPTION_SIZE, &size, "BYTES", "client: the largest message, up to 64K (8192)"},
    {"-loops", OPTION_NUMBER, &loops, "NUMBER", "client: round trips of each size (10000)"},
    {"-histogram", OPTION_FLAG, &histogram, NULL, "client: the best and the worst one as well"},
    {NULL, OPTION_FLAG, NULL, NULL, NULL},
};

static const struct program program = {
    "scipp",
    "latency of stores to another host's memory, half a round trip",
    "  rackbus on beta -- scipp -rn alpha -server\n"
    "  rackbus on alpha -- scipp -rn beta -client -loops 20000\n",
    options,
    1,
    2,
};

/* Both sides of the exchange, and the mark of the message to come. Marks never repeat. */
struct table {
    const struct session *session;
    struct own_segment own;
    struct peer_segment peer;
    uint32_t mark;
    unsigned char payload[LARGEST];
};
static struct table table;

static void send_message(size_t bytes)
{
    volatile unsigned char *there = table.peer.bytes + MESSAGES;
    /* The mark goes last, so that who sees it has the whole message. */
    if (bytes > 4)
        memcpy((void *)there, table.payload, bytes - 4);
    store_word(there + bytes - 4, table.mark);
}

static void receive_message(size_t bytes)
{
    wait_for_word(table.session, table.own.bytes + MESSAGES + bytes - 4, table.mark);
}

static void measure(size_t bytes)
{
    double best = 1e12, worst = 0, begun = 0, last = 0, mean;
    unsigned int i;
    for (i = 0; i < WARM_UP + loops; i++) {
        if (i == WARM_UP)
            begun = last = now();
        table.mark++;
        send_message(bytes);
        receive_message(bytes);
        if (histogram && i >= WARM_UP) {
            double time = now();
            double half = (time - last) / 2;
            best = half < best ? half : best;
            worst = half > worst ? half : worst;
            last = time;
        }
    }
    mean = (now() - begun) / loops / 2;
    peer_check(&table.peer);
    printf("%10lu %14.3f", (unsigned long)bytes, mean);
    if (histogram)
        printf(" %14.3f %14.3f", best, worst);
    printf("\n");
    if (table.session->json) {
        printf("{\"tool\":\"scipp\",\"bytes\":%lu,\"loops\":%u,\"us\":%.4f", (unsigned long)bytes,
               loops, mean);
        if (histogram)
            printf(",\"best_us\":%.4f,\"worst_us\":%.4f", best, worst);
        printf("}\n");
    }
}

static void client(void)
{
    volatile struct plan *plan = (volatile struct plan *)table.peer.bytes;
    size_t bytes;
    plan->loops = loops;
    plan->smallest = 4;
    plan->largest = (uint32_t)size;
    store_word(&plan->go, 1);
    printf("%10s %14s%s\n", "Bytes", "Latency (us)",
           histogram ? "      Best (us)     Worst (us)" : "");
    for (bytes = 4; bytes <= size; bytes *= 2)
        measure(bytes);
}

static void server(void)
{
    volatile struct plan *plan = (volatile struct plan *)table.own.bytes;
    size_t bytes, largest;
    wait_for_word(table.session, &plan->go, 1);
    loops = plan->loops;
    largest = plan->largest; /* read once: it is the client's to write */
    if (plan->smallest != 4 || largest > LARGEST)
        fail(SCI_ERR_OK, "the client asks for messages of up to %lu bytes", (unsigned long)largest);
    for (bytes = 4; bytes <= largest; bytes *= 2) {
        unsigned int i;
        for (i = 0; i < WARM_UP + loops; i++) {
            table.mark++;
            receive_message(bytes);
            send_message(bytes);
        }
    }
    printf("Answered %u messages\n", table.mark);
}

int main(int argc, char **argv)
{
    struct session session;
    read_options(&program, argc, argv);
    if (size < 4 || size > LARGEST || loops == 0)
        usage_error("-size is 4 to %d bytes, -loops at least 1", LARGEST);
    session_open(&session);
    table.session = &session;
    /* Both may be on one host: the ids differ by side. */
    own_create(&table.own, &session, session.id + (session.client ? 1 : 0), MESSAGES + LARGEST);
    peer_connect(&table.peer, &session, session.id + (session.client ? 0 : 1));
    if (session.client)
        client();
    else
        server();
    peer_disconnect(&table.peer);
    own_wait_until_left(&table.own, &session);
    own_remove(&table.own);
    session_close(&session);
    return EXIT_DONE;
}
