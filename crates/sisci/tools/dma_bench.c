/*
 * dma_bench: how fast the copy engine moves bytes between hosts, without the CPU. The server owns
 * a segment; the client moves its own segment there, or fetches it with -pull, in vectors of
 * growing pieces.
 */
#include <stdio.h>
#include <string.h>

#include "common.h"

static size_t size = 8 << 20;
static unsigned int loops = 200;
static unsigned int vector = 1;
static int pull;
static int user_memory;
static int asynchronous;

static struct option options[] = {
    {"-size", OPTION_SIZE, &size, "BYTES", "both: the segments, and the client's last row (8M)"},
    {"-loops", OPTION_NUMBER, &loops, "NUMBER", "transfers of each row (200)"},
    {"-vector", OPTION_NUMBER, &vector, "NUMBER", "pieces of each transfer, 1 to 256 (1)"},
    {"-pull", OPTION_FLAG, &pull, NULL, "fetch instead of bring"},
    {"-mem", OPTION_FLAG, &user_memory, NULL, "from the program's own memory, not a segment"},
    {"-async", OPTION_FLAG, &asynchronous, NULL, "start, then wait, instead of both in one call"},
    {NULL, OPTION_FLAG, NULL, NULL, NULL},
};

static const struct program program = {
    "dma_bench",
    "bandwidth of the copy engine to another host",
    "  rackbus on beta -- dma_bench -rn alpha -server\n"
    "  rackbus on alpha -- dma_bench -rn beta -client\n"
    "  rackbus on alpha -- dma_bench -rn beta -client -pull -vector 256\n",
    options,
    1,
    4,
};

/* The client's side: what is moved, and by which queue. */
struct engine {
    const struct session *session;
    struct own_segment own;
    sci_remote_segment_t remote;
    sci_dma_queue_t queue;
    dis_dma_vec_t pieces[DIS_DMA_MAX_VECLEN];
};
static struct engine engine;

static void connect_remote(void)
{
    const struct session *session = engine.session;
    double since = now();
    sci_error_t error;
    do {
        SCIConnectSegment(session->sd, &engine.remote, session->remote, session->id,
                          session->adapter, NULL, NULL, 0, 0, &error);
    } while (error != SCI_ERR_OK && try_again(session, error, since));
    check(error, "cannot connect to segment 0x%x of node %u", session->id, session->remote);
    if (SCIGetRemoteSegmentSize(engine.remote) < size)
        size = SCIGetRemoteSegmentSize(engine.remote);
}

/* Starts one transfer of vector pieces that lie one behind the other. */
static void start(size_t piece)
{
    unsigned int flags = (pull ? SCI_FLAG_DMA_READ : 0) | (asynchronous ? 0 : SCI_FLAG_DMA_WAIT);
    sci_error_t error;
    if (user_memory)
        SCIStartDmaTransferMem(engine.queue, (void *)engine.own.bytes, engine.remote, piece, 0,
                               NULL, NULL, flags, &error);
    else if (vector == 1)
        SCIStartDmaTransfer(engine.queue, engine.own.segment, engine.remote, 0, piece, 0, NULL,
                            NULL, flags, &error);
    else
        SCIStartDmaTransferVec(engine.queue, engine.own.segment, engine.remote, vector,
                               engine.pieces, NULL, NULL, flags, &error);
    check(error, "cannot transfer %u pieces of %lu bytes", vector, (unsigned long)piece);
}

static void finish(void)
{
    sci_dma_queue_state_t state = SCIDMAQueueState(engine.queue);
    sci_error_t error;
    if (asynchronous) {
        state = SCIWaitForDMAQueue(engine.queue, SCI_INFINITE_TIMEOUT, 0, &error);
        check(error, "cannot wait for the transfer");
    }
    if (state != SCI_DMAQUEUE_DONE)
        fail(SCI_ERR_TRANSFER_FAILED, "the queue is in state %d after a transfer", (int)state);
}

static void measure(size_t piece)
{
    size_t total = piece * vector;
    double begun, each;
    unsigned int i;
    for (i = 0; i < vector; i++) {
        engine.pieces[i].size = (unsigned int)piece;
        engine.pieces[i].local_offset = engine.pieces[i].remote_offset = (unsigned int)(i * piece);
        engine.pieces[i].flags = 0;
    }
    start(piece);
    finish();
    begun = now();
    for (i = 0; i < loops; i++) {
        start(piece);
        finish();
    }
    each = (now() - begun) / loops;
    printf("%10lu %10u %10lu %14.2f us %14.2f us %12.2f MBytes/s\n", (unsigned long)piece, vector,
           (unsigned long)total, each, each / vector, (double)total / each);
    if (engine.session->json)
        printf("{\"tool\":\"dma_bench\",\"direction\":\"%s\",\"bytes\":%lu,\"vector\":%u,"
               "\"loops\":%u,\"us\":%.4f,\"mbytes_per_s\":%.2f}\n",
               pull ? "pull" : "push", (unsigned long)piece, vector, loops, each,
               (double)total / each);
}

static void client(const struct session *session)
{
    sci_error_t error;
    size_t piece;
    engine.session = session;
    connect_remote();
    own_create(&engine.own, session, session->id + 1, size);
    SCICreateDMAQueue(session->sd, &engine.queue, session->adapter, vector, 0, &error);
    check(error, "cannot create a DMA queue of %u entries", vector);
    printf("%10s %10s %10s %17s %17s %21s\n", "Piece", "Vector", "Total", "Transfer time",
           "Time per piece", "Bandwidth");
    for (piece = 64; piece * vector <= size; piece *= 2)
        measure(piece);
    SCIRemoveDMAQueue(engine.queue, 0, &error);
    check(error, "cannot remove the DMA queue");
    SCIDisconnectSegment(engine.remote, 0, &error);
    check(error, "cannot disconnect from the other side's segment");
    own_remove(&engine.own);
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
    if (vector == 0 || vector > DIS_DMA_MAX_VECLEN || loops == 0 || size < 64)
        usage_error("-vector is 1 to %d, -loops at least 1, -size at least 64", DIS_DMA_MAX_VECLEN);
    if (user_memory && vector != 1)
        usage_error("-mem moves one piece at a time: leave out -vector");
    session_open(&session);
    if (session.client)
        client(&session);
    else
        server(&session);
    session_close(&session);
    return EXIT_DONE;
}
