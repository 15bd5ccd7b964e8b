/*
 * intr_bench: how long an interrupt takes to a program on another host. Both sides have an
 * interrupt and trigger the other's in turn; half a round trip is printed. With -data, the
 * interrupts carry a message.
 */
#include <stdio.h>
#include <string.h>

#include "common.h"

/* What the client tells the server, in a small segment of the server's. */
struct plan {
    uint32_t go;
    uint32_t loops;
    uint32_t length; /* of each message; 0: none */
};

/* With -inner: how many took 0-10 us, 10-20 us, ...; the last counts all that took longer. */
enum { STEP = 10, BUCKETS = 31 };

static unsigned int loops = 10000;
static unsigned int length;
static int inner;

static struct option options[] = {
    {"-loops", OPTION_NUMBER, &loops, "NUMBER", "client: round trips (10000)"},
    {"-data", OPTION_NUMBER, &length, "BYTES", "client: data interrupts, 4 to 1024 bytes each"},
    {"-inner", OPTION_FLAG, &inner, NULL, "client: best, worst, and how many took how long"},
    {NULL, OPTION_FLAG, NULL, NULL, NULL},
};

static const struct program program = {
    "intr_bench",
    "latency of interrupts to another host, half a round trip",
    "  rackbus on beta -- intr_bench -rn alpha -server\n"
    "  rackbus on alpha -- intr_bench -rn beta -client -loops 50000 -inner\n"
    "  rackbus on alpha -- intr_bench -rn beta -client -data 64\n",
    options,
    1,
    3,
};

/* The own and the peer's interrupt, of the kind that the plan asks for. */
struct exchange {
    const struct session *session;
    sci_local_interrupt_t own;
    sci_remote_interrupt_t peer;
    sci_local_data_interrupt_t own_data;
    sci_remote_data_interrupt_t peer_data;
    unsigned int timeout;
    uint32_t expected; /* number of the message to come */
};

static void exchange_create(struct exchange *exchange, const struct session *session)
{
    unsigned int number = session->id + (session->client ? 1 : 0);
    sci_error_t error;
    exchange->session = session;
    exchange->expected = 0;
    exchange->timeout =
        session->patience == 0 ? SCI_INFINITE_TIMEOUT : (unsigned int)(session->patience * 1e3);
    SCICreateInterrupt(session->sd, &exchange->own, session->adapter, &number, NULL, NULL,
                       SCI_FLAG_FIXED_INTNO, &error);
    check(error, "cannot create interrupt 0x%x", number);
    SCICreateDataInterrupt(session->sd, &exchange->own_data, session->adapter, &number, NULL, NULL,
                           SCI_FLAG_FIXED_INTNO, &error);
    check(error, "cannot create data interrupt 0x%x", number);
}

static void exchange_connect(struct exchange *exchange)
{
    const struct session *session = exchange->session;
    unsigned int number = session->id + (session->client ? 0 : 1);
    double since = now();
    sci_error_t error;
    do {
        SCIConnectInterrupt(session->sd, &exchange->peer, session->remote, session->adapter, number,
                            0, 0, &error);
    } while (error != SCI_ERR_OK && try_again(session, error, since));
    check(error, "cannot connect to interrupt 0x%x of node %u", number, session->remote);
    do {
        SCIConnectDataInterrupt(session->sd, &exchange->peer_data, session->remote,
                                session->adapter, number, 0, 0, &error);
    } while (error != SCI_ERR_OK && try_again(session, error, since));
    check(error, "cannot connect to data interrupt 0x%x of node %u", number, session->remote);
}

static void exchange_remove(struct exchange *exchange)
{
    sci_error_t error;
    SCIDisconnectInterrupt(exchange->peer, 0, &error);
    check(error, "cannot disconnect the interrupt");
    SCIDisconnectDataInterrupt(exchange->peer_data, 0, &error);
    check(error, "cannot disconnect the data interrupt");
    SCIRemoveInterrupt(exchange->own, 0, &error);
    check(error, "cannot remove the interrupt");
    SCIRemoveDataInterrupt(exchange->own_data, 0, &error);
    check(error, "cannot remove the data interrupt");
}

static void trigger(struct exchange *exchange)
{
    unsigned char message[SCI_MAX_DATA_INTERRUPT_LENGTH] = {0};
    sci_error_t error;
    if (length == 0) {
        SCITriggerInterrupt(exchange->peer, 0, &error);
    } else {
        memcpy(message, &exchange->expected, sizeof exchange->expected);
        SCITriggerDataInterrupt(exchange->peer_data, message, length, 0, &error);
    }
    check(error, "cannot trigger the interrupt");
}

static void wait_for_interrupt(struct exchange *exchange)
{
    unsigned char message[SCI_MAX_DATA_INTERRUPT_LENGTH];
    unsigned int got = sizeof message;
    uint32_t number;
    sci_error_t error;
    if (length == 0) {
        SCIWaitForInterrupt(exchange->own, exchange->timeout, 0, &error);
        check(error, "the other side does not answer");
        return;
    }
    SCIWaitForDataInterrupt(exchange->own_data, message, &got, exchange->timeout, 0, &error);
    check(error, "the other side does not answer");
    memcpy(&number, message, sizeof number);
    if (got != length || number != exchange->expected)
        fail(SCI_ERR_OK, "message %u of %u bytes came instead of message %u of %u", number, got,
             exchange->expected, length);
}

static void print_result(const struct session *session, double mean, double best, double worst,
                         const unsigned int buckets[BUCKETS])
{
    unsigned int i;
    printf("Average interrupt latency: %.3f us (%u round trips, %u bytes)\n", mean, loops, length);
    if (inner) {
        printf("Best: %.3f us, worst: %.3f us\n", best, worst);
        for (i = 0; i < BUCKETS; i++) {
            if (buckets[i] == 0)
                continue;
            if (i == BUCKETS - 1)
                printf("  over %3u us: %u\n", i * STEP, buckets[i]);
            else
                printf("%4u-%3u us: %u\n", i * STEP, (i + 1) * STEP, buckets[i]);
        }
    }
    if (session->json) {
        printf("{\"tool\":\"intr_bench\",\"bytes\":%u,\"loops\":%u,\"us\":%.4f", length, loops,
               mean);
        if (inner)
            printf(",\"best_us\":%.4f,\"worst_us\":%.4f", best, worst);
        printf("}\n");
    }
}

static void client(struct exchange *exchange)
{
    unsigned int buckets[BUCKETS] = {0};
    double best = 1e12, worst = 0;
    double begun = now();
    double last = begun;
    unsigned int i;
    for (i = 0; i < loops; i++) {
        trigger(exchange);
        wait_for_interrupt(exchange);
        exchange->expected++;
        if (inner) {
            double time = now();
            double half = (time - last) / 2;
            unsigned int bucket = BUCKETS - 1;
            if (half < STEP * (BUCKETS - 1))
                bucket = (unsigned int)(half / STEP);
            buckets[bucket]++;
            best = half < best ? half : best;
            worst = half > worst ? half : worst;
            last = time;
        }
    }
    print_result(exchange->session, (now() - begun) / loops / 2, best, worst, buckets);
}

static void run_client(const struct session *session, struct exchange *exchange)
{
    struct peer_segment peer;
    volatile struct plan *plan;
    peer_connect(&peer, session, session->id);
    plan = (volatile struct plan *)peer.bytes;
    plan->loops = loops;
    plan->length = length;
    store_word(&plan->go, 1);
    exchange_connect(exchange);
    client(exchange);
    peer_disconnect(&peer);
}

static void run_server(const struct session *session, struct exchange *exchange)
{
    struct own_segment own;
    volatile struct plan *plan;
    unsigned int i;
    own_create(&own, session, session->id, 4096);
    plan = (volatile struct plan *)own.bytes;
    wait_for_word(session, &plan->go, 1);
    loops = plan->loops;
    length = plan->length; /* read once: it is the client's to write */
    if (length > SCI_MAX_DATA_INTERRUPT_LENGTH)
        fail(SCI_ERR_OK, "the client asks for messages of %u bytes", length);
    exchange_connect(exchange);
    for (i = 0; i < loops; i++) {
        wait_for_interrupt(exchange);
        trigger(exchange);
        exchange->expected++;
    }
    printf("Answered %u interrupts\n", loops);
    own_wait_until_left(&own, session);
    own_remove(&own);
}

int main(int argc, char **argv)
{
    struct session session;
    struct exchange exchange;
    read_options(&program, argc, argv);
    if (loops == 0 || length > SCI_MAX_DATA_INTERRUPT_LENGTH || (length != 0 && length < 4))
        usage_error("-loops is at least 1, -data 4 to %u bytes", SCI_MAX_DATA_INTERRUPT_LENGTH);
    session_open(&session);
    exchange_create(&exchange, &session);
    if (session.client)
        run_client(&session, &exchange);
    else
        run_server(&session, &exchange);
    exchange_remove(&exchange);
    session_close(&session);
    return EXIT_DONE;
}
