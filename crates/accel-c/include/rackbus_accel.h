/*
 * Driving an accelerator that was borrowed from a rack: through the vfio-user socket that its lease has, or, in a
 * VM, at the PCI address at which it was plugged in. The book's chapter "Renting accelerators" tells how to set up
 * either.
 *
 * Every function that returns an int returns RACKBUS_ACCEL_OK (0), a positive number where it says so, or one of
 * the negative errors below; rackbus_accel_error() then has a line of text. A rackbus_accel is used by one thread
 * at a time. Several of them do not know of each other.
 *
 * Link with -lrackbus_accel. Programs are C99 or newer, or C++11.
 */
#ifndef RACKBUS_ACCEL_H
#define RACKBUS_ACCEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Errors. */
#define RACKBUS_ACCEL_OK 0
#define RACKBUS_ACCEL_INVALID (-1)     /* an argument is not what this header says, or what the function can do */
#define RACKBUS_ACCEL_OPEN (-2)        /* the function cannot be opened */
#define RACKBUS_ACCEL_FULL (-3)        /* as many requests are under way in the queue as may be */
#define RACKBUS_ACCEL_OPERATION (-4)   /* an operation failed; the text says how */
#define RACKBUS_ACCEL_LOST (-5)        /* the function failed, or is gone; close it */
#define RACKBUS_ACCEL_MEMORY (-6)      /* memory to share with the function could not be had */
#define RACKBUS_ACCEL_NO_ANSWER (-7)   /* no answer in time; new requests are INVALID until what was given up has ended */
#define RACKBUS_ACCEL_INTERNAL (-8)    /* a defect of this library */
#define RACKBUS_ACCEL_ENDED (-9)       /* the program wanted no more results */

/* Operations, as descriptors number them. */
#define RACKBUS_ACCEL_COPY 3
#define RACKBUS_ACCEL_AES256CTR 4      /* context: a key of 32 bytes; nonce: the first counter block */
#define RACKBUS_ACCEL_AES256GCM 5      /* context: a key; nonce: 12 bytes; output: ciphertext and tag of 16 bytes */
#define RACKBUS_ACCEL_AES256GCM_OPEN 6 /* the reverse */
#define RACKBUS_ACCEL_SHA256 7
#define RACKBUS_ACCEL_SHA3_512 8
#define RACKBUS_ACCEL_BLAKE3 9
#define RACKBUS_ACCEL_DEFLATE 10
#define RACKBUS_ACCEL_INFLATE 11
#define RACKBUS_ACCEL_ZSTD 12
#define RACKBUS_ACCEL_UNZSTD 13
#define RACKBUS_ACCEL_LZ4 14
#define RACKBUS_ACCEL_UNLZ4 15
#define RACKBUS_ACCEL_REGEX 16         /* context: patterns, one a line */
#define RACKBUS_ACCEL_CRC32C 17

/* How a request ended. */
#define RACKBUS_ACCEL_SUCCESS 0
#define RACKBUS_ACCEL_INVALID_OPERATION 1
#define RACKBUS_ACCEL_INVALID_FIELD 2
#define RACKBUS_ACCEL_INVALID_CONTEXT 3
#define RACKBUS_ACCEL_TRANSFER 4
#define RACKBUS_ACCEL_OUTPUT_TOO_SMALL 5
#define RACKBUS_ACCEL_CORRUPT_INPUT 6
#define RACKBUS_ACCEL_NOT_AUTHENTIC 7
#define RACKBUS_ACCEL_ENGINE_FAILED 8
#define RACKBUS_ACCEL_NO_ROOM 9
#define RACKBUS_ACCEL_CONDITION_FAILED 10
#define RACKBUS_ACCEL_TIMED_OUT 11
#define RACKBUS_ACCEL_UNREACHABLE 12

/* Operations of a chain at most. */
#define RACKBUS_ACCEL_STAGES 4

/* A function in use. */
typedef struct rackbus_accel rackbus_accel;

/* How to use a function. What is 0 is as usual. */
typedef struct rackbus_accel_options {
	uint16_t queues;     /* queue pairs; usually 1 */
	uint16_t depth;      /* requests under way in each, up to 4095; usually 32 */
	uint16_t segments;   /* segments of a message at most, up to 256; usually 16 */
	uint16_t polled;     /* 1: who waits polls, and never sleeps until an interrupt */
	uint64_t data;       /* bytes of memory for data; usually 4 MiB */
} rackbus_accel_options;

/* What a function says of itself. */
typedef struct rackbus_accel_info {
	uint32_t queues;     /* queue pairs that it has */
	uint32_t contexts;   /* contexts at most */
	uint32_t largest;    /* bytes of a message at most */
	uint32_t reserved;   /* 0 */
	uint64_t operations; /* bit N: operation N is available */
	uint64_t data;       /* bytes of memory for data */
} rackbus_accel_info;

/* A part of the memory for data. */
typedef struct rackbus_accel_segment {
	uint64_t offset;
	uint64_t length;
} rackbus_accel_segment;

/*
 * A request: up to four operations, one after the other, on what the segments of the input have, one after the
 * other. What comes out goes into those of the output. The segments are not looked at any more when the call
 * returns; the memory for data that they name is the function's until the request has ended.
 */
typedef struct rackbus_accel_request {
	uint64_t token;                            /* what the completion has, too */
	uint8_t operations[RACKBUS_ACCEL_STAGES];  /* 0 behind the last */
	uint16_t contexts[RACKBUS_ACCEL_STAGES];   /* the context of each; 0 for none */
	uint32_t associated;                       /* bytes of the input that AES-GCM authenticates only */
	uint8_t nonce[16];                         /* of AES-GCM (12 bytes), or first counter block of AES-CTR */
	const rackbus_accel_segment *input;
	const rackbus_accel_segment *output;
	uint32_t input_segments;
	uint32_t output_segments;
} rackbus_accel_request;

/* A request that has ended. */
typedef struct rackbus_accel_completion {
	uint64_t token;
	uint32_t status;     /* RACKBUS_ACCEL_SUCCESS and so on */
	uint32_t output;     /* bytes that came out */
	uint32_t engine_ns;  /* engine time that is charged for it; 0 where none is */
	uint32_t reserved;   /* 0 */
} rackbus_accel_completion;

/* Opens the function at a vfio-user socket. options may be NULL. */
int rackbus_accel_open_socket(const char *path, const rackbus_accel_options *options, rackbus_accel **accel);

/* Opens the function at a PCI address of this machine, "01:00.0"; NULL: the only one that there is. */
int rackbus_accel_open_pci(const char *address, const rackbus_accel_options *options, rackbus_accel **accel);

/* Gives it back: requests under way are given up, keys are wiped. NULL is left alone. */
void rackbus_accel_close(rackbus_accel *accel);

/* What went wrong in this thread's last call that failed: a line of text, valid until the next one fails. */
const char *rackbus_accel_error(void);

/* A status in words. */
const char *rackbus_accel_status_text(uint32_t status);

int rackbus_accel_get_info(const rackbus_accel *accel, rackbus_accel_info *info);

/* The memory for data, as many bytes as the info says. It is there until the function is closed. */
void *rackbus_accel_data(const rackbus_accel *accel);

/*
 * Keeps a key (32 bytes), or patterns (text, one a line), for an operation; a key is for all three operations of
 * AES. The library keeps no copy. Nothing is under way in queue 0 meanwhile.
 */
int rackbus_accel_create_context(rackbus_accel *accel, unsigned operation, const void *data, size_t length,
				 uint16_t *context);

/* Wipes a context. Nothing is under way in queue 0 meanwhile. */
int rackbus_accel_destroy_context(rackbus_accel *accel, uint16_t context);

/* Puts a request into a queue. The function hears of it by rackbus_accel_ring. */
int rackbus_accel_submit(rackbus_accel *accel, unsigned queue, const rackbus_accel_request *request);

/* Tells the function of all requests that were put into a queue. */
int rackbus_accel_ring(rackbus_accel *accel, unsigned queue);

/* The next request of a queue that has ended: 1; none has: 0. Requests end in any order. */
int rackbus_accel_poll(rackbus_accel *accel, unsigned queue, rackbus_accel_completion *completion);

/* The same; waits up to so many milliseconds until there is one. */
int rackbus_accel_wait(rackbus_accel *accel, unsigned queue, unsigned milliseconds,
		       rackbus_accel_completion *completion);

/*
 * Does the operations of a request (its segments are not used) on a whole message, and waits. output has room for
 * so many bytes; written is how many came out. It takes the memory for data, and nothing is under way in queue 0.
 */
int rackbus_accel_run(rackbus_accel *accel, const rackbus_accel_request *request, const void *input, size_t length,
		      void *output, size_t room, size_t *written);

/*
 * Called with what came out of a message of a drive, which begins there at offset. It returns 0 to go on. It does not
 * use the accelerator.
 */
typedef int (*rackbus_accel_each)(void *argument, uint64_t offset, const void *output, size_t length);

/*
 * Does the operations of a request (its segments are not used) on what a drive has, which is the one behind a vfio-user
 * socket, or at a PCI address of this machine ("02:00.0", in a guest, bound as the accelerator is): length bytes from
 * offset on, in messages of so many bytes (whole blocks, at most the info's largest; 0: 1 MiB, or half of it where more
 * may come out than goes in). The drive reads into memory that the accelerator takes it from; the program only tells
 * both, and takes results, in the order of the drive. AES-CTR counts on from message to message, as if all were one; it
 * is the first operation then. AES-GCM needs a nonce for each message: with it, length is one message at most. It takes
 * the memory for data, and nothing is under way in queue 0, whose depth is 6 at least. It ends with
 * RACKBUS_ACCEL_ENDED when each did not return 0.
 */
int rackbus_accel_run_drive(rackbus_accel *accel, const rackbus_accel_request *request, const char *drive,
			    uint64_t offset, uint64_t length, size_t message, rackbus_accel_each each,
			    void *argument);

#ifdef __cplusplus
}
#endif

#endif
