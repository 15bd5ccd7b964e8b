/*
 * nvme.c: drives a borrowed NVMe drive through the SISCI API alone.
 *
 * The program borrows a drive of any host, maps its registers, gives it memory for queues and data, and writes,
 * flushes, reads and compares. With -memory it borrows a memory function as well, and the drive writes straight into
 * that one's BAR: peer-to-peer. With -segment it has the drive read from a segment of another host.
 *
 *   rackbus on beta -- ./nvme -drive alpha/nvme0
 *   rackbus on beta -- ./nvme -drive alpha/nvme0 -memory gamma/ram0
 *   rackbus on beta -- ./nvme -drive alpha/nvme0 -segment 12 4711
 *
 * The drive's registers are plain memory here, which its controller looks at: loads and stores, no system call.
 * References are to the NVM Express base specification 1.4.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sisci_api.h"

/* Registers (section 3.1), in bytes from the BAR's beginning. */
enum { CAP = 0x00, CC = 0x14, CSTS = 0x1c, AQA = 0x24, ASQ = 0x28, ACQ = 0x30, DOORBELLS = 0x1000 };
/* Opcodes (sections 5 and 6). */
enum { CREATE_SQ = 0x01, CREATE_CQ = 0x05, IDENTIFY = 0x06 };
enum { FLUSH = 0x00, WRITE = 0x01, READ = 0x02 };
/* The memory that the drive is given: a page for each queue, for what it tells of itself, and pages for data. */
enum { PAGE = 4096, ADMIN_SQ = 0, ADMIN_CQ = PAGE, IO_SQ = 2 * PAGE, IO_CQ = 3 * PAGE, TOLD = 4 * PAGE,
       DATA = 5 * PAGE, DATA_BYTES = 2 * PAGE, MEMORY = DATA + 2 * DATA_BYTES };
enum { ENTRIES = 16, PATIENCE_S = 10, MEMORY_BAR = 2 };

static sci_error_t error;

static void fail(const char *what)
{
    fprintf(stderr, "nvme: %s: %s\n", what, SCIGetErrorString(error));
    exit(1);
}

#define TRY(call)                  \
    do {                           \
        call;                      \
        if (error != SCI_ERR_OK)   \
            fail(#call);           \
    } while (0)

/* A queue pair: both rings are in the memory that the drive was given. */
struct queue {
    unsigned int id;
    volatile uint32_t *sq;
    volatile uint32_t *cq;
    unsigned int tail, head, phase;
};

struct drive {
    sci_smartio_device_t device;
    sci_remote_segment_t bar;
    sci_map_t bar_map;
    volatile uint8_t *registers;
    sci_local_segment_t memory;
    sci_map_t memory_map;
    volatile uint8_t *bytes;
    sci_ioaddr_t address; /* where the drive finds it */
    unsigned int stride;
    unsigned int block; /* bytes */
    struct queue admin, io;
};

static volatile uint32_t *reg(struct drive *drive, unsigned int offset)
{
    return (volatile uint32_t *)(drive->registers + offset);
}

/* The device reads all ones when it is not there any more: its lease is over, or its lender gone. */
static int is_gone(struct drive *drive)
{
    return *reg(drive, CSTS) == 0xffffffffU;
}

static time_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

/* Waits until bits of CSTS are as they should be. */
static void await_status(struct drive *drive, uint32_t mask, uint32_t wanted)
{
    time_t begun = now();
    while ((*reg(drive, CSTS) & mask) != wanted || is_gone(drive)) {
        if (is_gone(drive) || now() > begun + PATIENCE_S) {
            fprintf(stderr, "nvme: CSTS is 0x%x\n", (unsigned int)*reg(drive, CSTS));
            exit(1);
        }
    }
}

static void ring(struct drive *drive, unsigned int number, unsigned int value)
{
    /* What the drive is to see before. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    *reg(drive, DOORBELLS + number * drive->stride) = value;
}

/* Runs a command and waits for its completion (section 4.6). Answers its status, or -1 when the device is gone. */
static int run(struct drive *drive, struct queue *queue, const uint32_t command[16])
{
    volatile uint32_t *entry = queue->sq + 16 * queue->tail;
    volatile uint32_t *completion = queue->cq + 4 * queue->head;
    time_t begun = now();
    unsigned int i, status;
    for (i = 0; i < 16; i++)
        entry[i] = command[i];
    queue->tail = (queue->tail + 1) % ENTRIES;
    ring(drive, 2 * queue->id, queue->tail);
    while (((completion[3] >> 16) & 1) != queue->phase) {
        if (is_gone(drive))
            return -1;
        if (now() > begun + PATIENCE_S) {
            fprintf(stderr, "nvme: command 0x%x is not answered\n", (unsigned int)command[0]);
            exit(1);
        }
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    status = completion[3] >> 17;
    queue->head = (queue->head + 1) % ENTRIES;
    if (queue->head == 0)
        queue->phase ^= 1;
    ring(drive, 2 * queue->id + 1, queue->head);
    return (int)status;
}

static void must(const char *what, int status)
{
    if (status != 0) {
        fprintf(stderr, status < 0 ? "nvme: %s: the device is gone\n" : "nvme: %s: status 0x%x\n", what,
                (unsigned int)status);
        exit(1);
    }
}

static void set_address(uint32_t *command, unsigned int dword, sci_ioaddr_t address)
{
    command[dword] = (uint32_t)address;
    command[dword + 1] = (uint32_t)(address >> 32);
}

static void admin(struct drive *drive, const char *what, unsigned int opcode, sci_ioaddr_t address,
                  uint32_t dword10, uint32_t dword11)
{
    uint32_t command[16] = {0};
    command[0] = opcode;
    command[1] = opcode == IDENTIFY && dword10 == 0 ? 1 : 0; /* the namespace that is asked about */
    set_address(command, 6, address);
    command[10] = dword10;
    command[11] = dword11;
    must(what, run(drive, &drive->admin, command));
}

/* Moves blocks from lba on between the medium and whatever is at an address of the drive's. */
static int transfer(struct drive *drive, unsigned int opcode, uint64_t lba, sci_ioaddr_t address,
                    unsigned int bytes)
{
    uint32_t command[16] = {0};
    command[0] = opcode;
    command[1] = 1;
    if (opcode != FLUSH) {
        set_address(command, 6, address);
        if (bytes > PAGE)
            set_address(command, 8, address + PAGE);
        command[10] = (uint32_t)lba;
        command[11] = (uint32_t)(lba >> 32);
        command[12] = bytes / drive->block - 1;
    }
    return run(drive, &drive->io, command);
}

/* The fabric device id of a device, by its name in the rack. */
static unsigned long long find(sci_desc_t sd, const char *name)
{
    unsigned long long fdid;
    sci_smartio_device_info_t filter;
    size_t found;
    memset(&filter, 0, sizeof filter);
    strncpy(filter.user_name, name, sizeof filter.user_name - 1);
    TRY(found = SCIGetDeviceList(sd, &fdid, 1, &filter, 0, &error));
    if (found != 1) {
        fprintf(stderr, "nvme: the rack has no device %s; see `rackbus devices`\n", name);
        exit(1);
    }
    return fdid;
}

/* Connects to a BAR of a borrowed device and maps all of it. */
static volatile uint8_t *map_bar(sci_desc_t sd, sci_smartio_device_t device, unsigned int bar,
                                 sci_remote_segment_t *segment, sci_map_t *map)
{
    volatile uint8_t *mapped;
    TRY(SCIConnectDeviceMemory(sd, segment, 0, device, bar, 0, SCI_FLAG_BAR, &error));
    TRY(mapped = SCIMapRemoteSegment(*segment, map, 0, SCIGetRemoteSegmentSize(*segment), NULL, 0, &error));
    return mapped;
}

static void borrow(sci_desc_t sd, struct drive *drive, const char *name)
{
    TRY(SCIBorrowDevice(sd, &drive->device, find(sd, name), SCI_FLAG_EXCLUSIVE, &error));
    drive->registers = map_bar(sd, drive->device, 0, &drive->bar, &drive->bar_map);
    TRY(SCICreateSegment(sd, &drive->memory, 0, MEMORY, NULL, NULL, SCI_FLAG_PRIVATE | SCI_FLAG_AUTO_ID,
                         &error));
    TRY(SCIPrepareSegment(drive->memory, 0, 0, &error));
    TRY(drive->bytes = SCIMapLocalSegment(drive->memory, &drive->memory_map, 0, MEMORY, NULL, 0, &error));
    TRY(SCIMapLocalSegmentForDevice(drive->memory, 0, drive->device, &drive->address, 0, MEMORY, 0, &error));
}

static struct queue queue_at(struct drive *drive, unsigned int id, unsigned int sq, unsigned int cq)
{
    struct queue queue = {0};
    queue.id = id;
    queue.sq = (volatile uint32_t *)(drive->bytes + sq);
    queue.cq = (volatile uint32_t *)(drive->bytes + cq);
    queue.phase = 1;
    return queue;
}

/* Section 7.6.1: brings the controller up, asks what it is, and makes an I/O queue pair. */
static void start(struct drive *drive)
{
    const volatile uint8_t *told = drive->bytes + TOLD;
    uint32_t size = (ENTRIES - 1) << 16;
    char model[41] = {0};
    uint64_t blocks = 0;
    unsigned int i;
    *reg(drive, CC) = 0;
    await_status(drive, 1, 0);
    drive->stride = 4U << (*reg(drive, CAP + 4) & 0xf);
    *reg(drive, AQA) = size | (ENTRIES - 1);
    *reg(drive, ASQ) = (uint32_t)(drive->address + ADMIN_SQ);
    *reg(drive, ASQ + 4) = (uint32_t)((drive->address + ADMIN_SQ) >> 32);
    *reg(drive, ACQ) = (uint32_t)(drive->address + ADMIN_CQ);
    *reg(drive, ACQ + 4) = (uint32_t)((drive->address + ADMIN_CQ) >> 32);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    *reg(drive, CC) = 4U << 20 | 6U << 16 | 1; /* entries of 16 and 64 bytes; enable */
    await_status(drive, 1, 1);
    drive->admin = queue_at(drive, 0, ADMIN_SQ, ADMIN_CQ);
    drive->io = queue_at(drive, 1, IO_SQ, IO_CQ);
    admin(drive, "identify controller", IDENTIFY, drive->address + TOLD, 1, 0);
    for (i = 0; i < 40; i++)
        model[i] = (char)told[24 + i];
    admin(drive, "identify namespace", IDENTIFY, drive->address + TOLD, 0, 0);
    for (i = 0; i < 8; i++)
        blocks |= (uint64_t)told[i] << 8 * i;
    drive->block = 1U << told[128 + 4 * (told[26] & 0xf) + 2];
    admin(drive, "create completion queue", CREATE_CQ, drive->address + IO_CQ, size | 1, 1);
    admin(drive, "create submission queue", CREATE_SQ, drive->address + IO_SQ, size | 1, 1U << 16 | 1);
    printf("%.40s: %llu blocks of %u bytes\n", model, (unsigned long long)blocks, drive->block);
}

static void expect_same(const char *what, const volatile uint8_t *got, const volatile uint8_t *wanted,
                        unsigned int bytes)
{
    unsigned int i;
    for (i = 0; i < bytes; i++) {
        if (got[i] != wanted[i]) {
            fprintf(stderr, "nvme: %s: byte %u is 0x%x and not 0x%x\n", what, i, got[i], wanted[i]);
            exit(1);
        }
    }
    printf("%s: %u bytes are the same\n", what, bytes);
}

/* Writes, flushes, reads back and compares. */
static void write_and_read(struct drive *drive)
{
    volatile uint8_t *written = drive->bytes + DATA, *read = drive->bytes + DATA + DATA_BYTES;
    unsigned int i;
    for (i = 0; i < DATA_BYTES; i++)
        written[i] = (uint8_t)(i * 7 + i / 256 + 1);
    must("write", transfer(drive, WRITE, 8, drive->address + DATA, DATA_BYTES));
    must("flush", transfer(drive, FLUSH, 0, 0, 0));
    must("read", transfer(drive, READ, 8, drive->address + DATA + DATA_BYTES, DATA_BYTES));
    expect_same("write, flush, read", read, written, DATA_BYTES);
}

/* The drive reads straight into memory of another borrowed device, and writes from there. */
static void peer_to_peer(sci_desc_t sd, struct drive *drive, const char *name)
{
    sci_smartio_device_t device;
    sci_remote_segment_t bar;
    sci_map_t map;
    volatile uint8_t *memory;
    sci_ioaddr_t address;
    TRY(SCIBorrowDevice(sd, &device, find(sd, name), SCI_FLAG_EXCLUSIVE, &error));
    memory = map_bar(sd, device, MEMORY_BAR, &bar, &map);
    TRY(SCIMapRemoteSegmentForDevice(bar, drive->device, &address, PAGE, DATA_BYTES, 0, &error));
    must("read into another device", transfer(drive, READ, 8, address, DATA_BYTES));
    expect_same("drive to memory function", memory + PAGE, drive->bytes + DATA, DATA_BYTES);
    memory[PAGE] ^= 0xff;
    must("write from another device", transfer(drive, WRITE, 64, address, DATA_BYTES));
    must("read", transfer(drive, READ, 64, drive->address + DATA + DATA_BYTES, DATA_BYTES));
    expect_same("memory function to drive", drive->bytes + DATA + DATA_BYTES, memory + PAGE, DATA_BYTES);
    TRY(SCIUnmapRemoteSegmentForDevice(bar, drive->device, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(bar, 0, &error));
    TRY(SCIReturnDevice(device, 0, &error));
}

/* The drive writes what is in a segment of another host. */
static void from_segment(sci_desc_t sd, struct drive *drive, unsigned int node, unsigned int id)
{
    sci_remote_segment_t segment;
    sci_map_t map;
    volatile uint8_t *bytes;
    sci_ioaddr_t address;
    /* Its owner may still be about to make it. */
    time_t begun = now();
    do {
        SCIConnectSegment(sd, &segment, node, id, 0, NULL, NULL, SCI_INFINITE_TIMEOUT, 0, &error);
    } while (error == SCI_ERR_NO_SUCH_SEGMENT && now() <= begun + PATIENCE_S);
    if (error != SCI_ERR_OK)
        fail("SCIConnectSegment");
    TRY(bytes = SCIMapRemoteSegment(segment, &map, 0, PAGE, NULL, 0, &error));
    TRY(SCIMapRemoteSegmentForDevice(segment, drive->device, &address, 0, PAGE, 0, &error));
    must("write from a segment", transfer(drive, WRITE, 128, address, PAGE));
    must("read", transfer(drive, READ, 128, drive->address + DATA + DATA_BYTES, PAGE));
    expect_same("segment of another host to drive", drive->bytes + DATA + DATA_BYTES, bytes, PAGE);
    TRY(SCIUnmapRemoteSegmentForDevice(segment, drive->device, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(segment, 0, &error));
}

/* Reads until the device is taken away; then every use of it says so. */
static void use_until_gone(struct drive *drive)
{
    sci_ioaddr_t address;
    printf("in use\n");
    fflush(stdout);
    while (transfer(drive, READ, 8, drive->address + DATA, PAGE) == 0) {
    }
    while (!is_gone(drive)) {
    }
    SCIMapLocalSegmentForDevice(drive->memory, 0, drive->device, &address, 0, PAGE, 0, &error);
    printf("gone: %s\n", SCIGetErrorString(error));
    exit(error == SCI_ERR_NOT_CONNECTED ? 0 : 1);
}

/* Section 7.6.2: what was written is on the medium then. */
static void stop(struct drive *drive)
{
    *reg(drive, CC) = *reg(drive, CC) | 1U << 14;
    await_status(drive, 3U << 2, 2U << 2);
    TRY(SCIUnmapLocalSegmentForDevice(drive->memory, 0, drive->device, 0, &error));
    TRY(SCIUnmapSegment(drive->memory_map, 0, &error));
    TRY(SCIRemoveSegment(drive->memory, 0, &error));
    TRY(SCIUnmapSegment(drive->bar_map, 0, &error));
    TRY(SCIDisconnectSegment(drive->bar, 0, &error));
    TRY(SCIReturnDevice(drive->device, 0, &error));
}

int main(int argc, char **argv)
{
    const char *name = NULL, *memory = NULL;
    unsigned int node = 0, segment = 0;
    int i, until_gone = 0;
    struct drive drive;
    sci_desc_t sd;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-drive") == 0 && i + 1 < argc)
            name = argv[++i];
        else if (strcmp(argv[i], "-memory") == 0 && i + 1 < argc)
            memory = argv[++i];
        else if (strcmp(argv[i], "-segment") == 0 && i + 2 < argc) {
            node = (unsigned int)strtoul(argv[++i], NULL, 0);
            segment = (unsigned int)strtoul(argv[++i], NULL, 0);
        } else if (strcmp(argv[i], "-until-gone") == 0)
            until_gone = 1;
        else
            break;
    }
    if (i < argc || name == NULL) {
        fprintf(stderr, "usage: %s -drive HOST/DEVICE [-memory HOST/DEVICE] [-segment NODE ID] [-until-gone]\n",
                argv[0]);
        return 2;
    }
    memset(&drive, 0, sizeof drive);
    TRY(SCIInitialize(0, &error));
    TRY(SCIOpen(&sd, 0, &error));
    borrow(sd, &drive, name);
    start(&drive);
    write_and_read(&drive);
    if (memory != NULL)
        peer_to_peer(sd, &drive, memory);
    if (segment != 0)
        from_segment(sd, &drive, node, segment);
    if (until_gone)
        use_until_gone(&drive);
    stop(&drive);
    TRY(SCIClose(sd, 0, &error));
    SCITerminate();
    printf("nvme: ok\n");
    return 0;
}
