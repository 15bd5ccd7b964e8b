/*
 * Compresses and encrypts standard input in blocks, each in one pass through a borrowed accelerator, with
 * several blocks under way; then opens each again and compares. A block is in two separate buffers, as a
 * message that is in several places.
 *
 *   seal SOCKET          the vfio-user socket of a lease: rackbus borrow alpha/accel0.vf1 --for beta
 *   seal pci [ADDRESS]   in a VM that has the accelerator as a PCI function
 *
 * cc -o seal seal.c -lrackbus_accel
 */
#include <rackbus_accel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HALF = 32 << 10, BLOCK = 2 * HALF, SLOTS = 4 };
/* A slot of the memory for data: two halves with a hole between them, what is sealed, what is opened again. */
enum { FIRST = 0, SECOND = BLOCK, SEALED = 2 * BLOCK, OPENED = 4 * BLOCK, SLOT = 5 * BLOCK };

static rackbus_accel *accel;
static uint8_t *data;
static uint16_t context;

static void must(int outcome, const char *what)
{
	if (outcome < 0) {
		fprintf(stderr, "seal: %s: %s\n", what, rackbus_accel_error());
		exit(1);
	}
}

static void open_accelerator(int count, char **arguments)
{
	rackbus_accel_options options = { 0 };
	options.depth = SLOTS;
	options.data = SLOTS * SLOT;
	if (count >= 2 && strcmp(arguments[1], "pci") == 0)
		must(rackbus_accel_open_pci(count > 2 ? arguments[2] : NULL, &options, &accel), "open");
	else if (count == 2)
		must(rackbus_accel_open_socket(arguments[1], &options, &accel), "open");
	else {
		fprintf(stderr, "usage: seal SOCKET | seal pci [ADDRESS]\n");
		exit(2);
	}
	data = rackbus_accel_data(accel);
}

/* Submits a block: sealed from its two halves, or opened from what was sealed. */
static void submit(uint64_t block, int seal, const rackbus_accel_segment *input, uint32_t segments,
		   rackbus_accel_segment output)
{
	rackbus_accel_request request = { 0 };
	request.token = block;
	request.operations[0] = seal ? RACKBUS_ACCEL_ZSTD : RACKBUS_ACCEL_AES256GCM_OPEN;
	request.operations[1] = seal ? RACKBUS_ACCEL_AES256GCM : RACKBUS_ACCEL_UNZSTD;
	request.contexts[seal ? 1 : 0] = context;
	/* A nonce is never used twice with a key: here it is the block's number. */
	memcpy(request.nonce, &block, sizeof block);
	request.input = input;
	request.input_segments = segments;
	request.output = &output;
	request.output_segments = 1;
	must(rackbus_accel_submit(accel, 0, &request), "submit");
}

/* Waits for so many requests; how many bytes came out of each, by slot. */
static void collect(unsigned count, uint64_t sizes[SLOTS])
{
	must(rackbus_accel_ring(accel, 0), "ring");
	while (count > 0) {
		rackbus_accel_completion done;
		int some = rackbus_accel_wait(accel, 0, 60000, &done);
		must(some, "wait");
		if (some == 0 || done.status != RACKBUS_ACCEL_SUCCESS) {
			fprintf(stderr, "seal: %s\n", some ? rackbus_accel_status_text(done.status) : "no answer");
			exit(1);
		}
		sizes[done.token % SLOTS] = done.output;
		count--;
	}
}

int main(int count, char **arguments)
{
	uint64_t block = 0, in = 0, out = 0;
	uint8_t key[32];

	open_accelerator(count, arguments);
	FILE *random = fopen("/dev/urandom", "rb");
	if (!random || fread(key, sizeof key, 1, random) != 1) {
		perror("/dev/urandom");
		return 1;
	}
	fclose(random);
	must(rackbus_accel_create_context(accel, RACKBUS_ACCEL_AES256GCM, key, sizeof key, &context), "key");

	for (unsigned slots = SLOTS; slots == SLOTS;) {
		size_t lengths[SLOTS][2];
		uint64_t sealed[SLOTS], opened[SLOTS];
		for (slots = 0; slots < SLOTS; slots++) {
			uint64_t at = slots * (uint64_t)SLOT;
			lengths[slots][0] = fread(data + at + FIRST, 1, HALF, stdin);
			lengths[slots][1] = fread(data + at + SECOND, 1, HALF, stdin);
			if (lengths[slots][0] == 0)
				break;
			rackbus_accel_segment halves[2] = { { at + FIRST, lengths[slots][0] },
							    { at + SECOND, lengths[slots][1] } };
			rackbus_accel_segment output = { at + SEALED, 2 * BLOCK };
			submit(block + slots, 1, halves, 2, output);
		}
		collect(slots, sealed);
		for (unsigned slot = 0; slot < slots; slot++) {
			uint64_t at = slot * (uint64_t)SLOT;
			rackbus_accel_segment input = { at + SEALED, sealed[slot] }, output = { at + OPENED, BLOCK };
			submit(block + slot, 0, &input, 1, output);
		}
		collect(slots, opened);
		for (unsigned slot = 0; slot < slots; slot++) {
			const uint8_t *at = data + slot * (size_t)SLOT;
			size_t first = lengths[slot][0], second = lengths[slot][1];
			if (opened[slot] != first + second || memcmp(at + OPENED, at + FIRST, first) != 0 ||
			    memcmp(at + OPENED + first, at + SECOND, second) != 0) {
				fprintf(stderr, "seal: block %llu came back otherwise\n",
					(unsigned long long)(block + slot));
				return 1;
			}
			in += first + second;
			out += sealed[slot];
		}
		block += slots;
	}
	must(rackbus_accel_destroy_context(accel, context), "wipe the key");
	rackbus_accel_close(accel);
	printf("%llu blocks, %llu bytes, sealed %llu bytes\n", (unsigned long long)block,
	       (unsigned long long)in, (unsigned long long)out);
	return 0;
}
