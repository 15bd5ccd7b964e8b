/*
 * A small NVMe driver in a guest's user space: the drive reads into, and writes from, the BAR of another PCI
 * function, by the address at which the guest has programmed it.
 *
 * Usage: peer DRIVE TARGET BAR COMMAND, devices as folders of /sys/bus/pci/devices. COMMAND is
 *   move      the drive reads what it has into the BAR, and writes back what this program stored there
 *   refused   the drive cannot read into the BAR; ends with 0 when it says so
 *
 * No kernel driver may be bound to the drive. Registers: NVM Express base 1.4, section 3.1.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, HUGE_PAGE = 2 << 20, ENTRIES = 8, BLOCKS = 16 };
enum { CAP = 0x00, CC = 0x14, CSTS = 0x1c, AQA = 0x24, ASQ = 0x28, ACQ = 0x30, DOORBELLS = 0x1000 };
enum { CREATE_SQ = 0x01, CREATE_CQ = 0x05, WRITE = 0x01, READ = 0x02 };

struct command {
	uint32_t cdw0, nsid;
	uint64_t reserved, metadata, prp1, prp2;
	uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
};

struct completion {
	uint32_t result, reserved;
	uint16_t head, queue, id, status;
};

struct queue {
	struct command *commands;
	volatile struct completion *completions;
	int number, tail, head, phase;
};

static volatile uint8_t *registers;
static int stride;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void wrong(const char *what)
{
	fprintf(stderr, "%s\n", what);
	exit(1);
}

static uint32_t read4(int at) { return *(volatile uint32_t *)(registers + at); }
static void write4(int at, uint32_t value) { *(volatile uint32_t *)(registers + at) = value; }

static void write8(int at, uint64_t value)
{
	write4(at, (uint32_t)value);
	write4(at + 4, (uint32_t)(value >> 32));
}

static void *map(const char *device, int bar, size_t length)
{
	char path[256];
	snprintf(path, sizeof path, "%s/resource%d", device, bar);
	int file = open(path, O_RDWR | O_SYNC);
	if (file < 0)
		fail(path);
	void *mapped = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (mapped == MAP_FAILED)
		fail(path);
	close(file);
	return mapped;
}

/* Where the guest has a BAR: the device's "resource" has a line for each. */
static uint64_t bar_address(const char *device, int bar)
{
	char path[256];
	unsigned long long begin = 0;
	snprintf(path, sizeof path, "%s/resource", device);
	FILE *file = fopen(path, "r");
	if (!file)
		fail(path);
	for (int line = 0; line <= bar; line++)
		if (fscanf(file, "%llx %*x %*x", &begin) != 1)
			fail(path);
	fclose(file);
	return begin;
}

/* The guest-physical address of memory that is there. */
static uint64_t physical(void *memory)
{
	uint64_t entry = 0;
	int file = open("/proc/self/pagemap", O_RDONLY);
	if (file < 0 || pread(file, &entry, 8, (uintptr_t)memory / PAGE * 8) != 8 || !(entry >> 63))
		fail("/proc/self/pagemap");
	close(file);
	return (entry & ((1ull << 55) - 1)) * PAGE;
}

static void wait_ready(uint32_t ready)
{
	for (time_t until = time(NULL) + 10; (read4(CSTS) & 1) != ready;)
		if (time(NULL) > until)
			wrong("the controller is not ready");
}

/* Runs a command; returns its status, without the phase and with no more than type and code. */
static int run(struct queue *queue, struct command command)
{
	queue->commands[queue->tail] = command;
	queue->tail = (queue->tail + 1) % ENTRIES;
	__sync_synchronize();
	write4(DOORBELLS + (2 * queue->number) * stride, queue->tail);
	volatile struct completion *done = &queue->completions[queue->head];
	for (time_t until = time(NULL) + 10; (done->status & 1) != queue->phase;)
		if (time(NULL) > until)
			wrong("no answer");
	int status = done->status >> 1 & 0x7ff;
	if (++queue->head == ENTRIES) {
		queue->head = 0;
		queue->phase ^= 1;
	}
	write4(DOORBELLS + (2 * queue->number + 1) * stride, queue->head);
	return status;
}

static void expect(int status, const char *what)
{
	if (status) {
		fprintf(stderr, "%s: status %#x\n", what, status);
		exit(1);
	}
}

int main(int count, char **arguments)
{
	if (count != 5) {
		fprintf(stderr, "usage: peer DRIVE TARGET BAR move|refused\n");
		return 2;
	}
	const char *drive = arguments[1], *target = arguments[2];
	int bar = atoi(arguments[3]), move = !strcmp(arguments[4], "move");
	size_t length = BLOCKS * 512;
	uint64_t peer = bar_address(target, bar) + PAGE;

	registers = map(drive, 0, 2 * PAGE);
	uint8_t *memory = mmap(NULL, HUGE_PAGE, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED)
		fail("a huge page (echo 1 >/proc/sys/vm/nr_hugepages)");
	memset(memory, 0, HUGE_PAGE);
	uint64_t at = physical(memory);
	struct queue admin = { (void *)memory, (void *)(memory + PAGE), 0, 0, 0, 1 };
	struct queue io = { (void *)(memory + 2 * PAGE), (void *)(memory + 3 * PAGE), 1, 0, 0, 1 };
	uint8_t *data = memory + 4 * PAGE;
	uint64_t data_at = at + 4 * PAGE;

	stride = 4 << (read4(CAP + 4) & 0xf);
	write4(CC, 0);
	wait_ready(0);
	write4(AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
	write8(ASQ, at);
	write8(ACQ, at + PAGE);
	write4(CC, 6 << 16 | 4 << 20 | 1);
	wait_ready(1);
	uint32_t size = (ENTRIES - 1) << 16 | 1;
	expect(run(&admin, (struct command){ .cdw0 = CREATE_CQ, .prp1 = at + 3 * PAGE, .cdw10 = size,
					     .cdw11 = 1 }), "create a completion queue");
	expect(run(&admin, (struct command){ .cdw0 = CREATE_SQ, .prp1 = at + 2 * PAGE, .cdw10 = size,
					     .cdw11 = 1 << 16 | 1 }), "create a submission queue");

	struct command to_peer = { .cdw0 = READ, .nsid = 1, .prp1 = peer, .prp2 = peer + PAGE,
				   .cdw12 = BLOCKS - 1 };
	if (!move) {
		int status = run(&io, to_peer);
		printf("status %#x\n", status);
		/* Data Transfer Error. */
		return status == 0x04 ? 0 : 1;
	}
	volatile uint8_t *peers = (volatile uint8_t *)map(target, bar, 4 * PAGE) + PAGE;
	struct command own = to_peer;
	own.prp1 = data_at;
	own.prp2 = data_at + PAGE;
	for (size_t n = 0; n < length; n++)
		data[n] = n * 7 + n / 512;
	own.cdw0 = WRITE;
	expect(run(&io, own), "write from memory");
	expect(run(&io, to_peer), "read into the BAR");
	for (size_t n = 0; n < length; n++)
		if (peers[n] != data[n])
			wrong("other bytes came into the BAR");
	for (size_t n = 0; n < length; n++)
		peers[n] = n * 5 + 3;
	to_peer.cdw0 = WRITE;
	expect(run(&io, to_peer), "write from the BAR");
	own.cdw0 = READ;
	expect(run(&io, own), "read into memory");
	for (size_t n = 0; n < length; n++)
		if (data[n] != (uint8_t)(n * 5 + 3))
			wrong("other bytes came from the BAR");
	write4(CC, 0);
	wait_ready(0);
	printf("%zu bytes at %#llx each way\n", length, (unsigned long long)peer);
	return 0;
}
