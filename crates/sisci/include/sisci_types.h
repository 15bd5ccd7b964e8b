/*
 * Types of the SISCI API: handles, callbacks, what they are called with, and what SCIQuery fills
 * in.
 *
 * Handles are opaque. A handle is valid from the call that made it until the call that removes it,
 * and compares equal to NULL before; the library refuses every other value with an error.
 */
#ifndef SISCI_TYPES_H
#define SISCI_TYPES_H

#include <stddef.h>

#include "dis_types.h"
#include "sisci_error.h"

/* How a parameter is used. They expand to nothing; programs use them too. */
#ifndef IN
#define IN
#endif
#ifndef OUT
#define OUT
#endif
#ifndef IN_OUT
#define IN_OUT
#endif

/* A program's access to the rack, which owns all that is made with it. */
typedef struct sci_desc *sci_desc_t;
/* Memory of this host that others may use. */
typedef struct sci_local_segment *sci_local_segment_t;
/* A connection to another host's segment. */
typedef struct sci_remote_segment *sci_remote_segment_t;
/* A part of a segment in this process's address space. */
typedef struct sci_map *sci_map_t;
/* Watches a map for transfers that failed. */
typedef struct sci_sequence *sci_sequence_t;
/* Transfers of the copy engine, and an engine that may be asked for. */
typedef struct sci_dma_queue *sci_dma_queue_t;
typedef struct sci_dma_channel *sci_dma_channel_t;
/* An interrupt that others trigger here, and a connection to another host's. */
typedef struct sci_local_interrupt *sci_local_interrupt_t;
typedef struct sci_remote_interrupt *sci_remote_interrupt_t;
/* The same with a message, of at most SCI_MAX_DATA_INTERRUPT_LENGTH bytes. */
typedef struct sci_local_data_interrupt *sci_local_data_interrupt_t;
typedef struct sci_remote_data_interrupt *sci_remote_data_interrupt_t;
/* A block transfer of the 1.x API. */
typedef struct sci_block_transfer *sci_block_transfer_t;
/* A borrowed device. The second name is the older one. */
typedef struct sci_smartio_device *sci_smartio_device_t;
typedef sci_smartio_device_t sci_device_t;

/* An address on a host's I/O bus. */
typedef unsigned long long sci_ioaddr_t;

/* An address in the global space of the 1.x hardware. */
typedef struct {
    unsigned short nodeId;
    unsigned short offsHi;
    unsigned int offsLo;
} sci_address_t;

/* What happened to a segment. */
typedef enum {
    SCI_CB_CONNECT = 1,         /* somebody connected to it */
    SCI_CB_DISCONNECT = 2,      /* somebody disconnected, or the owner asks for it */
    SCI_CB_NOT_OPERATIONAL = 3, /* the way to the other host is gone for now */
    SCI_CB_OPERATIONAL = 4,     /* the way is back */
    SCI_CB_LOST = 5             /* the segment or its host is gone for good */
} sci_segment_cb_reason_t;
#define MAX_CB_REASON SCI_CB_LOST

/* What a callback answers: whether it wants to be called again. */
typedef enum {
    SCI_CALLBACK_CANCEL = 1,
    SCI_CALLBACK_CONTINUE = 2
} sci_callback_action_t;

typedef enum {
    SCI_DMAQUEUE_IDLE = 0,    /* nothing in it */
    SCI_DMAQUEUE_GATHER = 1,  /* 1.x: enqueued, not yet posted */
    SCI_DMAQUEUE_POSTED = 2,  /* under way */
    SCI_DMAQUEUE_DONE = 3,    /* all bytes are at their place */
    SCI_DMAQUEUE_ABORTED = 4, /* by SCIAbortDMAQueue */
    SCI_DMAQUEUE_ERROR = 5    /* a transfer failed */
} sci_dma_queue_state_t;

typedef enum {
    SCI_SEQ_OK = 0,            /* all stores up to here arrived */
    SCI_SEQ_RETRIABLE = 1,     /* some did not: store them again */
    SCI_SEQ_NOT_RETRIABLE = 2, /* some did not, and the segment may be gone */
    SCI_SEQ_PENDING = 3        /* not known yet: ask again */
} sci_sequence_status_t;

typedef enum {
    SCI_DMA_TYPE_DONTCARE = 1,
    SCI_DMA_TYPE_ADAPTER = 2,
    SCI_DMA_TYPE_GLOBAL = 3,
    SCI_DMA_TYPE_SYSTEM = 4,
    SCI_DMA_TYPE_TRANSPARENT = 5
} sci_dma_type_t;

/*
 * Callbacks. They run on a thread of the library, one at a time for each handle, and may call the
 * API on the same descriptor. They are used only with SCI_FLAG_USE_CALLBACK.
 */
typedef sci_callback_action_t (*sci_cb_local_segment_t)(void *arg, sci_local_segment_t segment,
                                                        sci_segment_cb_reason_t reason,
                                                        unsigned int nodeId,
                                                        unsigned int localAdapterNo,
                                                        sci_error_t error);
typedef sci_callback_action_t (*sci_cb_remote_segment_t)(void *arg, sci_remote_segment_t segment,
                                                         sci_segment_cb_reason_t reason,
                                                         sci_error_t status);
typedef sci_callback_action_t (*sci_cb_dma_t)(void *arg, sci_dma_queue_t queue,
                                              sci_error_t status);
typedef sci_callback_action_t (*sci_cb_interrupt_t)(void *arg, sci_local_interrupt_t interrupt,
                                                    sci_error_t status);
typedef sci_callback_action_t (*sci_cb_data_interrupt_t)(void *arg,
                                                         sci_local_data_interrupt_t interrupt,
                                                         void *data, unsigned int length,
                                                         sci_error_t status);
typedef int (*sci_cb_block_transfer_t)(void *arg, sci_block_transfer_t block, sci_error_t status);

/*
 * SCI_Q_VENDORID, SCI_Q_API, SCI_Q_SISCI_DRIVER_VERSION: a text goes to str, length bytes at most.
 */
typedef struct {
    char *str;
    unsigned int length;
} sci_query_string_t;

/* SCI_Q_ADAPTER. portNo counts from 0 and matters for the subcommands about a link. */
typedef struct {
    unsigned int localAdapterNo;
    unsigned int portNo;
    unsigned int subcommand;
    void *data;
} sci_query_adapter_t;

/* SCI_Q_SYSTEM. */
typedef struct {
    unsigned int subcommand;
    void *data;
} sci_query_system_t;

/* SCI_Q_DMA; the flags of SCIQuery choose the kind of engine. */
typedef struct {
    unsigned int localAdapterNo;
    unsigned int subcommand;
    void *data;
} sci_query_dma_t;

/* SCI_Q_LOCAL_SEGMENT. */
typedef struct {
    sci_local_segment_t segment;
    unsigned int subcommand;
    union {
        sci_ioaddr_t ioaddr;
    } data;
} sci_query_local_segment_t;

/* SCI_Q_REMOTE_SEGMENT. */
typedef struct {
    sci_remote_segment_t segment;
    unsigned int subcommand;
    union {
        sci_ioaddr_t ioaddr;
    } data;
} sci_query_remote_segment_t;

/* SCI_Q_MAP. */
typedef struct {
    sci_map_t map;
    unsigned int subcommand;
    unsigned long long data;
} sci_query_map_t;

/* SCI_Q_DEVICE; data points to a sci_smartio_device_info_t. */
typedef struct {
    unsigned long long fdid;
    unsigned int subcommand;
    void *data;
} sci_smartio_query_device_t;

/* SCI_Q_DMA_CAPABILITIES; sizes and alignments in bytes, the support members are 0 or 1. */
typedef struct {
    unsigned int num_channels;
    unsigned int max_transfer_size;
    unsigned int max_vector_length;
    unsigned int support_mem2io;
    unsigned int support_io2mem;
    unsigned int support_io2io;
    unsigned int min_align_bytes;
    unsigned int suggested_align_bytes;
} sci_dma_capabilities_t;

/* A device that can be borrowed. bdf is bus, device and function as on its host's bus. */
typedef struct {
    unsigned long long fdid;
    unsigned short pci_device_id;
    unsigned short pci_vendor_id;
    unsigned int pci_class;
    unsigned short pci_subsystem_device_id;
    unsigned short pci_subsystem_vendor_id;
    unsigned long long pci_serial_number;
    unsigned short remote_bdf;
    unsigned short local_bdf;
    unsigned int adapter;
    unsigned int nodeid;
    int physical_slot;
    char user_name[64];
    char uuid[37];
} sci_smartio_device_info_t;

#endif
