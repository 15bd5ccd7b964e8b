/*
 * Copies by the CPU, sequences and barriers, and the block transfers of the 1.x API. The owner's
 * segment is the far end.
 */
#define _DEFAULT_SOURCE

#include "scenario.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { FAR = 0xc0b7, NEAR = 0xc0b8, SECOND = 0xc0b9, SIZE = 1 << 16 };

/* What the peer works with. */
static struct {
    sci_map_t far_map, near_map;
    volatile unsigned char *far_bytes, *near_bytes;
    sci_sequence_t sequence;
    unsigned char memory[SIZE];
} copy;

static void fill(unsigned int seed)
{
    size_t i;
    for (i = 0; i < SIZE; i++)
        copy.memory[i] = (unsigned char)(seed + i * 3 + i / 256);
}

static int arrived(size_t far_offset, size_t offset, size_t size)
{
    return memcmp((const void *)(copy.far_bytes + far_offset), copy.memory + offset, size) == 0;
}

static void copied(void)
{
    unsigned char back[100];
    fill(1);
    TRY(SCIMemCpy(copy.sequence, copy.memory, copy.far_map, 0, SIZE, 0, &error));
    CHECK(arrived(0, 0, SIZE));
    fill(2);
    TRY(SCIMemCpy(copy.sequence, copy.memory + 1, copy.far_map, 3, 4099, SCI_FLAG_ERROR_CHECK,
                  &error));
    CHECK(arrived(3, 1, 4099) && !arrived(3 + 4099, 1 + 4099, 8));
    TRY(SCIMemCpy(NULL, copy.memory, copy.far_map, 8000, 1, 0, &error));
    CHECK(arrived(8000, 0, 1));
    /* The other way. */
    copy.far_bytes[77] = 0xee;
    memset(back, 0, sizeof back);
    TRY(SCIMemCpy(copy.sequence, back + 1, copy.far_map, 77, 2, SCI_FLAG_BLOCK_READ, &error));
    CHECK(back[0] == 0 && back[1] == 0xee && back[2] == copy.far_bytes[78] && back[3] == 0);
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMemCpy(copy.sequence, copy.memory, copy.far_map, SIZE - 7, 8, 0, &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMemCpy(copy.sequence, copy.memory, copy.far_map, (size_t)-1, 8, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_FLAG,
            SCIMemCpy(copy.sequence, copy.memory, copy.far_map, 0, 8, 0x80000000U, &error));
    SetSciMemCopyFunction(5);
    CHECK(GetSciMemCopyFunction() >= 0);
    fill(9);
    TRY(SCIMemCopy(copy.memory, copy.far_map, 16, 64, 0, &error));
    CHECK(arrived(16, 0, 64));
    fill(10);
    TRY(SCIMemCpy_dual(copy.sequence, copy.memory, copy.far_map, copy.near_map, 32, 640, 0,
                       &error));
    CHECK(arrived(32, 0, 640));
    CHECK(memcmp((const void *)(copy.near_bytes + 32), copy.memory, 640) == 0);
}

static void written(void)
{
    fill(3);
    TRY(SCIMemWrite(copy.memory + 5, copy.far_bytes + 9, 1000, 0, &error));
    CHECK(arrived(9, 5, 1000));
    REFUSED(SCI_ERR_ILLEGAL_ADDRESS, SCIMemWrite(NULL, copy.far_bytes, 8, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_ADDRESS, SCIMemWrite(copy.memory, NULL, 8, 0, &error));
}

static void sequences(void)
{
    sci_sequence_t fast;
    sci_sequence_status_t status;
    TRY(status = SCICheckSequence(copy.sequence, 0, &error)); /* without a start before it */
    CHECK(status == SCI_SEQ_OK);
    do {
        TRY(status = SCIStartSequence(copy.sequence, 0, &error));
    } while (status != SCI_SEQ_OK);
    copy.far_bytes[0]++;
    TRY(status = SCICheckSequence(copy.sequence, 0, &error));
    CHECK(status == SCI_SEQ_OK);
    TRY(status = SCICheckSequence(copy.sequence, SCI_FLAG_NO_FLUSH | SCI_FLAG_NO_STORE_BARRIER,
                                  &error));
    CHECK(status == SCI_SEQ_OK);
    TRY(SCICreateMapSequence(copy.far_map, &fast, SCI_FLAG_FAST_BARRIER, &error));
    SCIFlush(NULL, 0);
    SCIFlush(NULL, SCI_FLAG_FLUSH_CPU_BUFFERS_ONLY);
    SCIFlush(fast, 0);
    SCIStoreBarrier(fast, 0);
    SCIFlushReadBuffers(fast);
    TRY(SCIRemoveSequence(fast, 0, &error));
    REFUSED_SOMEHOW(SCIRemoveSequence(fast, 0, &error));
    SCIFlush(fast, 0); /* nothing to flush by, and no harm */
    TRY(SCICacheSync(NULL, copy.memory, SIZE, SCI_FLAG_CACHE_FLUSH, &error));
    TRY(SCICacheSync(copy.far_map, (void *)copy.far_bytes, SIZE,
                     SCI_FLAG_CACHE_FLUSH | SCI_FLAG_CACHE_INVALIDATE, &error));
}

#ifndef __SANITIZE_THREAD__ /* whose own locks stay locked in a thread that is cancelled there */
static int flushing;

static void *flush_for_ever(void *arg)
{
    int before;
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
    for (;;) {
        SCIFlush(NULL, 0);
        SCIFlush((sci_sequence_t)arg, 0);
        __atomic_store_n(&flushing, 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}
#endif

/* Programs cancel a thread wherever it is, which is in SCIFlush most of the time. */
static void cancelled(void)
{
#ifndef __SANITIZE_THREAD__
    unsigned int i;
    for (i = 0; i < 2000; i++) {
        pthread_t thread;
        __atomic_store_n(&flushing, 0, __ATOMIC_SEQ_CST);
        CHECK(pthread_create(&thread, NULL, flush_for_ever, (void *)copy.sequence) == 0);
        AWAIT(__atomic_load_n(&flushing, __ATOMIC_SEQ_CST));
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
    }
#endif
    SCIFlush(copy.sequence, 0); /* nothing is left locked */
}

/*
 * The library finds that memory is not there, as in a guest whose QEMU does not map it, and gives the program a
 * page of its own there: what is stored in that reaches nobody, and that is said.
 */
static void not_there(sci_remote_segment_t far_segment)
{
#ifndef __SANITIZE_ADDRESS__ /* which knows no mappings of the program's over the library's */
    enum { BEGINNING = 4096 };
    sci_sequence_status_t status = SCI_SEQ_OK;
    sci_sequence_t sequence;
    sci_map_t map;
    volatile unsigned char *bytes;
    FILE *empty = tmpfile();
    CHECK(empty != NULL);
    TRY(bytes = (volatile unsigned char *)SCIMapRemoteSegment(far_segment, &map, 0, SIZE, NULL, 0, &error));
    TRY(SCICreateMapSequence(map, &sequence, 0, &error));
    TRY(status = SCIStartSequence(sequence, 0, &error));
    CHECK(status == SCI_SEQ_OK);
    CHECK(mmap((void *)(bytes + BEGINNING), 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
               fileno(empty), 0) == (void *)(bytes + BEGINNING));
    bytes[BEGINNING] = 1;
    REFUSED(SCI_ERR_TRANSFER_FAILED, status = SCICheckSequence(sequence, 0, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED, status = SCICheckSequence(sequence, 0, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED, status = SCIStartSequence(sequence, 0, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED,
            SCIMemCpy(sequence, copy.memory, map, 0, 64, SCI_FLAG_ERROR_CHECK, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED, SCITransferBlock(map, 0, copy.near_map, 0, 64, 0, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED, SCITransferBlock(copy.near_map, 0, map, 0, 64, 0, &error));
    CHECK(status != SCI_SEQ_OK);
    TRY(SCIRemoveSequence(sequence, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    fclose(empty);
    /* Other mappings of the segment have it. */
    TRY(status = SCICheckSequence(copy.sequence, 0, &error));
    CHECK(status == SCI_SEQ_OK);
#else
    (void)far_segment;
#endif
}

static unsigned int called;

static int on_block(void *arg, sci_block_transfer_t block, sci_error_t status)
{
    CALLED();
    CHECK(arg == (void *)&called && block != NULL && status == SCI_ERR_OK);
    __atomic_add_fetch(&called, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/* Within the call for its end, a transfer is not waited for. */
static int waits_for_itself(void *arg, sci_block_transfer_t block, sci_error_t status)
{
    sci_error_t own = NOT_SET;
    CALLED();
    CHECK(arg == (void *)&called && status == SCI_ERR_OK);
    SCIWaitForBlockTransfer(block, SCI_INFINITE_TIMEOUT, 0, &own);
    CHECK(own == SCI_ERR_OK);
    __atomic_add_fetch(&called, 1, __ATOMIC_SEQ_CST);
    return 0;
}

static void blocks(void)
{
    sci_block_transfer_t block;
    size_t i;
    for (i = 0; i < SIZE; i++)
        copy.near_bytes[i] = (unsigned char)(i * 5);
    TRY(SCITransferBlock(copy.near_map, 100, copy.far_map, 200, 5000, 0, &error));
    CHECK(memcmp((const void *)(copy.far_bytes + 200), (const void *)(copy.near_bytes + 100),
                 5000) == 0);
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCITransferBlock(copy.near_map, SIZE - 10, copy.far_map, 0, 11, 0, &error));
    TRY(SCITransferBlockAsync(copy.far_map, 200, copy.near_map, 0, 5000, &block, NULL, NULL, 0,
                              &error));
    TRY(SCIWaitForBlockTransfer(block, SOON, 0, &error));
    CHECK(copy.near_bytes[0] == (unsigned char)(100 * 5));
    TRY(SCITransferBlockAsync(copy.near_map, 0, copy.far_map, 0, SIZE, &block, on_block, &called,
                              SCI_FLAG_USE_CALLBACK, &error));
    AWAIT(__atomic_load_n(&called, __ATOMIC_SEQ_CST) == 1);
    CHECK(memcmp((const void *)copy.far_bytes, (const void *)copy.near_bytes, SIZE) == 0);
    TRY(SCIWaitForBlockTransfer(block, SOON, 0, &error));
    TRY(SCITransferBlockAsync(copy.near_map, 0, copy.far_map, 0, SIZE, &block, waits_for_itself,
                              &called, SCI_FLAG_USE_CALLBACK, &error));
    AWAIT(__atomic_load_n(&called, __ATOMIC_SEQ_CST) == 2);
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIWaitForBlockTransfer(block, SOON, 0, &error));
}

/* What cannot be copied is refused before anything is under way. */
static void blocks_that_are_refused(sci_remote_segment_t far_segment)
{
    sci_block_transfer_t block;
    sci_map_t read_only;
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCITransferBlockAsync(copy.near_map, SIZE - 10, copy.far_map, 0, 11, &block, NULL, NULL,
                                  0, &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCITransferBlockAsync(copy.near_map, 0, copy.far_map, SIZE, 1, &block, NULL, NULL, 0,
                                  &error));
    TRY((void)SCIMapRemoteSegment(far_segment, &read_only, 0, SIZE, NULL, SCI_FLAG_READONLY_MAP,
                                  &error));
    REFUSED(SCI_ERR_ACCESS, SCITransferBlockAsync(copy.near_map, 0, read_only, 0, 8, &block, NULL,
                                                  NULL, 0, &error));
    TRY(SCITransferBlockAsync(read_only, 0, copy.near_map, 0, 8, &block, NULL, NULL, 0, &error));
    TRY(SCIWaitForBlockTransfer(block, SOON, 0, &error));
    TRY(SCIUnmapSegment(read_only, 0, &error));
}

static unsigned int failed_calls;

/* A wait within the call is told as the call is, and is the one that a later wait would have been. */
static int on_failed_block(void *arg, sci_block_transfer_t block, sci_error_t status)
{
    sci_error_t own = SCI_ERR_TRANSFER_FAILED;
    CALLED();
    if (arg != NULL)
        SCIWaitForBlockTransfer(block, SCI_INFINITE_TIMEOUT, 0, &own);
    CHECK(status == SCI_ERR_TRANSFER_FAILED && own == SCI_ERR_TRANSFER_FAILED);
    __atomic_add_fetch(&failed_calls, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/* The far segment is gone: whoever waits for a transfer to it learns that it failed, called or not. */
static void blocks_that_fail(void)
{
    sci_block_transfer_t block;
    TRY(SCITransferBlockAsync(copy.near_map, 0, copy.far_map, 0, 64, &block, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED, SCIWaitForBlockTransfer(block, SOON, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIWaitForBlockTransfer(block, SOON, 0, &error));
    TRY(SCITransferBlockAsync(copy.near_map, 0, copy.far_map, 0, 64, &block, on_failed_block, NULL,
                              SCI_FLAG_USE_CALLBACK, &error));
    AWAIT(__atomic_load_n(&failed_calls, __ATOMIC_SEQ_CST) == 1);
    REFUSED(SCI_ERR_TRANSFER_FAILED, SCIWaitForBlockTransfer(block, SOON, 0, &error));
    TRY(SCITransferBlockAsync(copy.near_map, 0, copy.far_map, 0, 64, &block, on_failed_block,
                              &failed_calls, SCI_FLAG_USE_CALLBACK, &error));
    AWAIT(__atomic_load_n(&failed_calls, __ATOMIC_SEQ_CST) == 2);
}

/* A second segment goes, the first one stays: the check is of what was written, and of the sequence's. */
static void second_goes(struct scenario *scenario)
{
    sci_remote_segment_t remote;
    sci_sequence_t sequence;
    sci_map_t map;
    TRY(SCIConnectSegment(scenario->sd, &remote, scenario->peer, SECOND, 0, NULL, NULL, SOON, 0,
                          &error));
    TRY((void)SCIMapRemoteSegment(remote, &map, 0, SIZE, NULL, 0, &error));
    TRY(SCICreateMapSequence(map, &sequence, 0, &error));
    TRY(SCIMemCpy_dual(copy.sequence, copy.memory, copy.far_map, map, 0, 64, SCI_FLAG_ERROR_CHECK,
                       &error));
    scenario_meet(scenario);
    scenario_meet(scenario);
    AWAIT(SCICheckSequence(sequence, 0, &error) != SCI_SEQ_OK);
    TRY(SCIMemCpy(copy.sequence, copy.memory, copy.far_map, 0, 64, SCI_FLAG_ERROR_CHECK, &error));
    fill(11);
    REFUSED(SCI_ERR_TRANSFER_FAILED,
            SCIMemCpy_dual(NULL, copy.memory, map, copy.far_map, 0, 64, SCI_FLAG_ERROR_CHECK, &error));
    CHECK(arrived(0, 0, 64));
    REFUSED(SCI_ERR_TRANSFER_FAILED, SCIMemCpy_dual(copy.sequence, copy.memory, copy.far_map, map, 0,
                                                    64, SCI_FLAG_ERROR_CHECK, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED,
            SCIMemCpy(copy.sequence, copy.memory, map, 0, 64, SCI_FLAG_ERROR_CHECK, &error));
    REFUSED(SCI_ERR_TRANSFER_FAILED,
            SCIMemCpy(sequence, copy.memory, copy.far_map, 0, 64, SCI_FLAG_ERROR_CHECK, &error));
    TRY(SCIRemoveSequence(sequence, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(remote, 0, &error));
}

static void peer(struct scenario *scenario)
{
    sci_local_segment_t near_segment;
    sci_remote_segment_t far_segment;
    sci_sequence_status_t status = SCI_SEQ_OK;
    TRY(SCICreateSegment(scenario->sd, &near_segment, NEAR, SIZE, NULL, NULL, 0, &error));
    TRY(copy.near_bytes = (volatile unsigned char *)SCIMapLocalSegment(
            near_segment, &copy.near_map, 0, SIZE, NULL, 0, &error));
    POLL(SCI_ERR_NO_SUCH_SEGMENT, SCIConnectSegment(scenario->sd, &far_segment, scenario->peer, FAR, 0,
                                                    NULL, NULL, 0, 0, &error));
    TRY(copy.far_bytes = (volatile unsigned char *)SCIMapRemoteSegment(
            far_segment, &copy.far_map, 0, SIZE, NULL, 0, &error));
    TRY(SCICreateMapSequence(copy.far_map, &copy.sequence, 0, &error));
    copied();
    written();
    sequences();
    cancelled();
    blocks();
    blocks_that_are_refused(far_segment);
    not_there(far_segment);
    second_goes(scenario);
    scenario_meet(scenario);
    scenario_meet(scenario); /* the owner's segment is gone: stores no longer arrive, and that is seen */
    copy.far_bytes[0] = 1;
    AWAIT((status = SCICheckSequence(copy.sequence, 0, &error)) != SCI_SEQ_OK ||
          error != SCI_ERR_OK);
    REFUSED(SCI_ERR_TRANSFER_FAILED, SCIMemCpy(copy.sequence, copy.memory, copy.far_map, 0, 64,
                                               SCI_FLAG_ERROR_CHECK, &error));
    blocks_that_fail();
    TRY(SCIRemoveSequence(copy.sequence, 0, &error));
    TRY(SCIUnmapSegment(copy.far_map, 0, &error));
    TRY(SCIDisconnectSegment(far_segment, 0, &error));
    TRY(SCIUnmapSegment(copy.near_map, 0, &error));
    TRY(SCIRemoveSegment(near_segment, 0, &error));
}

static void owner(struct scenario *scenario)
{
    sci_local_segment_t segment, second;
    TRY(SCICreateSegment(scenario->sd, &second, SECOND, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(second, 0, 0, &error));
    TRY(SCISetSegmentAvailable(second, 0, 0, &error));
    TRY(SCICreateSegment(scenario->sd, &segment, FAR, SIZE, NULL, NULL, 0, &error));
    TRY(SCIPrepareSegment(segment, 0, 0, &error));
    TRY(SCISetSegmentAvailable(segment, 0, 0, &error));
    scenario_meet(scenario);
    TRY(SCIRemoveSegment(second, 0, &error));
    scenario_meet(scenario);
    scenario_meet(scenario);
    TRY(SCIRemoveSegment(segment, 0, &error));
    scenario_meet(scenario);
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    scenario_begin(&scenario, argc, argv);
    if (scenario.owner)
        owner(&scenario);
    else
        peer(&scenario);
    scenario_end(&scenario);
    return 0;
}
