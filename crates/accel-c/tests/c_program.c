/* What the library answers to a program's mistakes; the sockets of an accelerator and of a drive of
 * 4 MiB are its arguments. */
#include <rackbus_accel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int line;
static char large[2 << 20];

#define CHECK(holds) do { \
	if (!(holds)) { \
		fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #holds, rackbus_accel_error()); \
		exit(1); \
	} \
	line = __LINE__; \
} while (0)

/* What has come of the messages of a drive: the place of the next one, and how many are wanted. */
struct drive {
	uint64_t offset;
	unsigned wanted;
};

static int each(void *argument, uint64_t offset, const void *output, size_t length)
{
	struct drive *drive = argument;

	/* SHA-256 of 64 KiB of zeroes begins with de2f256064. */
	if (offset != drive->offset || length != 32 || memcmp(output, "\xde\x2f\x25\x60\x64", 5) != 0)
		return 1;
	drive->offset += 64 << 10;
	return --drive->wanted == 0;
}

int main(int count, char **arguments)
{
	rackbus_accel_options options;
	rackbus_accel_info info;
	rackbus_accel_request request;
	rackbus_accel_completion done;
	rackbus_accel_segment parts[3];
	rackbus_accel *accel = (rackbus_accel *)&options;
	uint16_t key = 0;
	uint8_t digest[32], secret[32];
	size_t written = 7;
	struct drive drive = { 0, 1000 };

	CHECK(count == 3);
	memset(&options, 0, sizeof options);
	memset(&request, 0, sizeof request);
	memset(secret, 9, sizeof secret);

	CHECK(rackbus_accel_open_socket("/nowhere", NULL, &accel) == RACKBUS_ACCEL_OPEN && accel == NULL);
	CHECK(strlen(rackbus_accel_error()) > 0);
	CHECK(rackbus_accel_open_socket(NULL, NULL, &accel) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_open_socket(arguments[1], NULL, NULL) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_open_pci("no address", NULL, &accel) == RACKBUS_ACCEL_OPEN);
	options.segments = 257;
	CHECK(rackbus_accel_open_socket(arguments[1], &options, &accel) == RACKBUS_ACCEL_INVALID);
	options.segments = 2;
	options.depth = 5000;
	CHECK(rackbus_accel_open_socket(arguments[1], &options, &accel) == RACKBUS_ACCEL_INVALID);
	options.depth = 2;
	options.data = 1 << 20;
	CHECK(rackbus_accel_open_socket(arguments[1], &options, &accel) == RACKBUS_ACCEL_OK);

	CHECK(rackbus_accel_get_info(accel, &info) == RACKBUS_ACCEL_OK);
	CHECK(info.data == 1 << 20 && info.operations >> RACKBUS_ACCEL_CRC32C & 1 && info.largest >= 1 << 20);
	CHECK(rackbus_accel_get_info(NULL, &info) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_data(NULL) == NULL && rackbus_accel_data(accel) != NULL);

	/* FIPS 180-2, section B.1. */
	request.operations[0] = RACKBUS_ACCEL_SHA256;
	CHECK(rackbus_accel_run(accel, &request, "abc", 3, digest, sizeof digest, &written) == RACKBUS_ACCEL_OK);
	CHECK(written == 32 && digest[0] == 0xba && digest[31] == 0xad);
	CHECK(rackbus_accel_run(accel, &request, "abc", 3, digest, 31, &written) == RACKBUS_ACCEL_OPERATION);
	CHECK(written == 0 && strstr(rackbus_accel_error(), "room"));
	CHECK(rackbus_accel_run(accel, &request, NULL, 3, digest, 32, &written) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_run(accel, &request, NULL, 0, digest, 32, &written) == RACKBUS_ACCEL_OK);
	CHECK(digest[0] == 0xe3 && digest[31] == 0x55);
	CHECK(rackbus_accel_run(accel, &request, "abc", 3, NULL, 32, &written) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_run(accel, &request, large, sizeof large, digest, 0, &written) == RACKBUS_ACCEL_INVALID);
	request.operations[0] = 200;
	CHECK(rackbus_accel_run(accel, &request, "abc", 3, digest, 32, &written) == RACKBUS_ACCEL_INVALID);

	CHECK(rackbus_accel_create_context(accel, RACKBUS_ACCEL_AES256CTR, secret, 31, &key) ==
	      RACKBUS_ACCEL_OPERATION);
	CHECK(rackbus_accel_create_context(accel, RACKBUS_ACCEL_AES256CTR, secret, 32, &key) == RACKBUS_ACCEL_OK);
	CHECK(rackbus_accel_destroy_context(accel, key) == RACKBUS_ACCEL_OK);
	CHECK(rackbus_accel_destroy_context(accel, key) == RACKBUS_ACCEL_OPERATION);

	/* Three parts where two are agreed on; what is not in the memory; a full queue. */
	memcpy(rackbus_accel_data(accel), "a-b-c", 5);
	parts[0].offset = 0, parts[1].offset = 2, parts[2].offset = 4;
	parts[0].length = parts[1].length = parts[2].length = 1;
	request.operations[0] = RACKBUS_ACCEL_COPY;
	request.input = parts;
	request.input_segments = 3;
	request.output = &parts[0];
	request.output_segments = 1;
	CHECK(rackbus_accel_submit(accel, 0, &request) == RACKBUS_ACCEL_INVALID);
	request.input_segments = 2;
	parts[1].length = UINT64_MAX;
	CHECK(rackbus_accel_submit(accel, 0, &request) == RACKBUS_ACCEL_INVALID);
	parts[1].length = 1;
	parts[2].offset = 100;
	parts[2].length = 2;
	request.output = &parts[2];
	CHECK(rackbus_accel_submit(accel, 3, &request) == RACKBUS_ACCEL_INVALID);
	for (request.token = 40; request.token < 42; request.token++)
		CHECK(rackbus_accel_submit(accel, 0, &request) == RACKBUS_ACCEL_OK);
	CHECK(rackbus_accel_submit(accel, 0, &request) == RACKBUS_ACCEL_FULL);
	CHECK(rackbus_accel_poll(accel, 0, &done) == 0);
	CHECK(rackbus_accel_ring(accel, 0) == RACKBUS_ACCEL_OK);
	for (int nth = 0; nth < 2; nth++) {
		CHECK(rackbus_accel_wait(accel, 0, 60000, &done) == 1);
		CHECK((done.token == 40 || done.token == 41) && done.output == 2);
		CHECK(done.status == RACKBUS_ACCEL_SUCCESS);
	}
	CHECK(memcmp((char *)rackbus_accel_data(accel) + 100, "ab", 2) == 0);
	CHECK(rackbus_accel_wait(accel, 0, 0, &done) == 0);
	CHECK(rackbus_accel_poll(accel, 0, NULL) == RACKBUS_ACCEL_INVALID);
	/* A queue that is not there is not one in which nothing happens. */
	CHECK(rackbus_accel_ring(accel, 63) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_poll(accel, 63, &done) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_wait(accel, 63, 0, &done) == RACKBUS_ACCEL_INVALID);
	CHECK(strcmp(rackbus_accel_status_text(RACKBUS_ACCEL_SUCCESS), "success") == 0);
	CHECK(strcmp(rackbus_accel_status_text(1000), "no such status") == 0);
	/* A drive's data: a queue that is too short; a range that is none; all of it; as much as is wanted. */
	request.operations[0] = RACKBUS_ACCEL_SHA256;
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 0, 4 << 20, 64 << 10, each, &drive) ==
	      RACKBUS_ACCEL_INVALID);
	rackbus_accel_close(accel);
	options.depth = 0;
	CHECK(rackbus_accel_open_socket(arguments[1], &options, &accel) == RACKBUS_ACCEL_OK);
	CHECK(rackbus_accel_run_drive(accel, &request, NULL, 0, 512, 0, each, &drive) == RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_run_drive(accel, &request, "/nowhere", 0, 512, 0, each, &drive) == RACKBUS_ACCEL_LOST);
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 0, 512, 0, NULL, &drive) ==
	      RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 4 << 20, 512, 0, each, &drive) ==
	      RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 0, 4 << 20, 64 << 10, each, &drive) ==
	      RACKBUS_ACCEL_OK);
	CHECK(drive.offset == 4 << 20);
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 0, 512, (size_t)-512, each, &drive) ==
	      RACKBUS_ACCEL_INVALID);
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 0, 512, (size_t)1 << 44, each, &drive) ==
	      RACKBUS_ACCEL_INVALID);
	drive.offset = 0;
	drive.wanted = 3;
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 0, 4 << 20, 64 << 10, each, &drive) ==
	      RACKBUS_ACCEL_ENDED);
	CHECK(drive.offset == 3 * (64 << 10));
	request.operations[0] = RACKBUS_ACCEL_INFLATE;
	CHECK(rackbus_accel_run_drive(accel, &request, arguments[2], 0, 4 << 20, 64 << 10, each, &drive) ==
	      RACKBUS_ACCEL_OPERATION);
	request.operations[0] = RACKBUS_ACCEL_SHA256;
	CHECK(rackbus_accel_run(accel, &request, "abc", 3, digest, 32, &written) == RACKBUS_ACCEL_OK);
	CHECK(written == 32 && digest[0] == 0xba);
	rackbus_accel_close(accel);
	rackbus_accel_close(NULL);
	printf("%d\n", line);
	return 0;
}
