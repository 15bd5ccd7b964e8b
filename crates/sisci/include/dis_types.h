/*
 * Types of the SISCI API whose names begin with "dis": lists of node ids, and the elements of a
 * vector for the copy engine (DMA).
 */
#ifndef DIS_TYPES_H
#define DIS_TYPES_H

/* Node ids that a list has room for, the zero after the last one included. */
#define DIS_NODEID_LIST_LENGTH 8

/*
 * Node ids of the adapters of one name, ended by a zero. Declare it by value and pass its address:
 * dis_nodeId_list_t list; SCIGetNodeIdByAdapterName("beta", &list, &type, 0, &error);
 */
typedef unsigned int dis_nodeId_list_t[DIS_NODEID_LIST_LENGTH];

/* What stands behind an adapter's name. The names of these values are rackbus's own. */
typedef enum {
    DIS_VIRT_ADAPTER_UNKNOWN = 0, /* no adapter has this name */
    DIS_VIRT_ADAPTER_RACKBUS = 1  /* a host of the rack */
} dis_virt_adapter_t;

/* Most elements of one vector (SCIStartDmaTransferVec). */
#define DIS_DMA_MAX_VECLEN 256

/* One piece of a vector: size bytes between an offset of each of both segments; flags are 0. */
typedef struct {
    unsigned int size;
    unsigned int local_offset;
    unsigned int remote_offset;
    unsigned int flags;
} dis_dma_vec_t;

/* Node id that means every host: connect to a broadcast (reflective) segment with it. */
#define DIS_BROADCAST_NODEID_GROUP_ALL 252

#endif
