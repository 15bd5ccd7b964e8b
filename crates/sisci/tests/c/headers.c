/*
 * The headers keep their promises: every number, layout and name that compiled programs have
 * inside of them is checked when this file is compiled, by a C and by a C++ compiler. Linked with
 * the library, it also shows that every function is exported.
 */
#include <stdio.h>

#include "dis_types.h"
#include "functions.h"
#include "sisci_api.h"
#include "sisci_api_macros.h"
#include "sisci_demolib.h"
#include "sisci_error.h"
#include "sisci_types.h"
#include "testlib.h"

#ifdef __cplusplus
#define CHECK(condition) static_assert(condition, #condition)
#else
#define CHECK(condition) __extension__ _Static_assert(condition, #condition)
#endif

/* An error is its code with the mask. */
#define CHECK_ERROR(name, code) CHECK((unsigned int)(name) == (0x40000000U | (code)))
/* A member begins where the one before it ends, or at the next multiple of its alignment. */
#define CHECK_OFFSET(type, member, offset) CHECK(offsetof(type, member) == (offset))

/* Errors. */
CHECK(SCI_ERR_MASK == 0x40000000 && SISCI_ERR_MASK == 0x40000000 && SCI_ERR_REMOTE_MASK == 0x01);
CHECK(SCI_ERR_OK == 0);
CHECK_ERROR(SCI_ERR_BUSY, 0x900);
CHECK_ERROR(SCI_ERR_FLAG_NOT_IMPLEMENTED, 0x901);
CHECK_ERROR(SCI_ERR_ILLEGAL_FLAG, 0x902);
CHECK_ERROR(SCI_ERR_NOSPC, 0x904);
CHECK_ERROR(SCI_ERR_API_NOSPC, 0x905);
CHECK_ERROR(SCI_ERR_HW_NOSPC, 0x906);
CHECK_ERROR(SCI_ERR_NOT_IMPLEMENTED, 0x907);
CHECK_ERROR(SCI_ERR_ILLEGAL_ADAPTERNO, 0x908);
CHECK_ERROR(SCI_ERR_NO_SUCH_ADAPTERNO, 0x909);
CHECK_ERROR(SCI_ERR_TIMEOUT, 0x90A);
CHECK_ERROR(SCI_ERR_OUT_OF_RANGE, 0x90B);
CHECK_ERROR(SCI_ERR_NO_SUCH_SEGMENT, 0x90C);
CHECK_ERROR(SCI_ERR_NO_SUCH_INTNO, 0x90C);
CHECK_ERROR(SCI_ERR_ILLEGAL_NODEID, 0x90D);
CHECK_ERROR(SCI_ERR_CONNECTION_REFUSED, 0x90E);
CHECK_ERROR(SCI_ERR_SEGMENT_NOT_CONNECTED, 0x90F);
CHECK_ERROR(SCI_ERR_SIZE_ALIGNMENT, 0x910);
CHECK_ERROR(SCI_ERR_OFFSET_ALIGNMENT, 0x911);
CHECK_ERROR(SCI_ERR_ILLEGAL_PARAMETER, 0x912);
CHECK_ERROR(SCI_ERR_MAX_ENTRIES, 0x913);
CHECK_ERROR(SCI_ERR_SEGMENT_NOT_PREPARED, 0x914);
CHECK_ERROR(SCI_ERR_ILLEGAL_ADDRESS, 0x915);
CHECK_ERROR(SCI_ERR_ILLEGAL_OPERATION, 0x916);
CHECK_ERROR(SCI_ERR_ILLEGAL_QUERY, 0x917);
CHECK_ERROR(SCI_ERR_SEGMENTID_USED, 0x918);
CHECK_ERROR(SCI_ERR_SYSTEM, 0x919);
CHECK_ERROR(SCI_ERR_CANCELLED, 0x91A);
CHECK_ERROR(SCI_ERR_NOT_CONNECTED, 0x91B);
CHECK_ERROR(SCI_ERR_NOT_AVAILABLE, 0x91C);
CHECK_ERROR(SCI_ERR_INCONSISTENT_VERSIONS, 0x91D);
CHECK_ERROR(SCI_ERR_COND_INT_RACE_PROBLEM, 0x91E);
CHECK_ERROR(SCI_ERR_OVERFLOW, 0x91F);
CHECK_ERROR(SCI_ERR_NOT_INITIALIZED, 0x920);
CHECK_ERROR(SCI_ERR_ACCESS, 0x921);
CHECK_ERROR(SCI_ERR_NO_SUCH_NODEID, 0xA00);
CHECK_ERROR(SCI_ERR_NODE_NOT_RESPONDING, 0xA02);
CHECK_ERROR(SCI_ERR_NO_REMOTE_LINK_ACCESS, 0xA04);
CHECK_ERROR(SCI_ERR_NO_LINK_ACCESS, 0xA05);
CHECK_ERROR(SCI_ERR_TRANSFER_FAILED, 0xA06);
CHECK_ERROR(SCI_ERR_REMOTE_BUSY, 0xB00);

/* Other enums. */
CHECK(SCI_CB_CONNECT == 1 && SCI_CB_DISCONNECT == 2 && SCI_CB_NOT_OPERATIONAL == 3);
CHECK(SCI_CB_OPERATIONAL == 4 && SCI_CB_LOST == 5 && MAX_CB_REASON == SCI_CB_LOST);
CHECK(SCI_DMAQUEUE_IDLE == 0 && SCI_DMAQUEUE_GATHER == 1 && SCI_DMAQUEUE_POSTED == 2);
CHECK(SCI_DMAQUEUE_DONE == 3 && SCI_DMAQUEUE_ABORTED == 4 && SCI_DMAQUEUE_ERROR == 5);
CHECK(SCI_SEQ_OK == 0 && SCI_SEQ_RETRIABLE == 1);
CHECK(SCI_SEQ_NOT_RETRIABLE == 2 && SCI_SEQ_PENDING == 3);
CHECK(SCI_CALLBACK_CANCEL == 1 && SCI_CALLBACK_CONTINUE == 2);
CHECK(SCI_DMA_TYPE_DONTCARE == 1 && SCI_DMA_TYPE_ADAPTER == 2 && SCI_DMA_TYPE_GLOBAL == 3);
CHECK(SCI_DMA_TYPE_SYSTEM == 4 && SCI_DMA_TYPE_TRANSPARENT == 5);
CHECK(SCI_DMA_CHANNEL_ID_DONTCARE == 0xffffffffU && SCI_INFINITE_TIMEOUT == 0xffffffffU);
CHECK(DIS_DMA_MAX_VECLEN == 256 && DIS_BROADCAST_NODEID_GROUP_ALL == 252);

/* Flags. */
CHECK(SCI_FLAG_USE_CALLBACK == 0x00000001);
CHECK(SCI_FLAG_EMPTY == 0x00000002);
CHECK(SCI_FLAG_PRIVATE == 0x00000004);
CHECK(SCI_FLAG_DMA_SOURCE_ONLY == 0x00000008);
CHECK(SCI_FLAG_FORCE_REMOVE == 0x00000020);
CHECK(SCI_FLAG_DMA_GLOBAL == 0x00000040);
CHECK(SCI_FLAG_ALLOW_UNICAST == 0x00000080);
CHECK(SCI_FLAG_PHYSICAL == 0x00001000);
CHECK(SCI_FLAG_CUDA_BUFFER == 0x00002000);
CHECK(SCI_FLAG_SCIF_BUFFER == 0x00004000);
CHECK(SCI_FLAG_AUTO_ID == 0x20000000);
CHECK(SCI_FLAG_BROADCAST == 0x00040000);
CHECK(SCI_FLAG_DMA_WAIT == 0x00000004);
CHECK(SCI_FLAG_DMA_READ == 0x00000010);
CHECK(SCI_FLAG_DMA_PHDMA == 0x00000020);
CHECK(SCI_FLAG_DMA_SYSDMA == 0x00000100);
CHECK(SCI_FLAG_DMA_USER_MEM == 0x00000200);
CHECK(SCI_FLAG_LOCK_USER_MEM == 0x00000400);
CHECK(SCI_FLAG_DMA_ADAPTER == 0x00000800);
CHECK(SCI_FLAG_DMA_CHANNEL_SHARED == 0x00000001);
CHECK(SCI_FLAG_FIXED_INTNO == 0x00000002);
CHECK(SCI_FLAG_SHARED_INT == 0x00000004);
CHECK(SCI_FLAG_CONDITIONAL_INTERRUPT == 0x00000008);
CHECK(SCI_FLAG_COUNTING_INT == 0x00000020);
CHECK(SCI_FLAG_SHARE_EXTERNAL == 0x00000040);
CHECK(SCI_FLAG_FIXED_MAP_ADDR == 0x00000001);
CHECK(SCI_FLAG_READONLY_MAP == 0x00000002);
CHECK(SCI_FLAG_LOCK_OPERATION == 0x00000004);
CHECK(SCI_FLAG_CONDITIONAL_INTERRUPT_MAP == 0x00000008);
CHECK(SCI_FLAG_UNCONDITIONAL_DATA_INTERRUPT_MAP == 0x00000010);
CHECK(SCI_FLAG_IO_MAP_IOSPACE == 0x00000080);
CHECK(SCI_FLAG_NO_MEMORY_LOOPBACK == 0x00000800);
CHECK(SCI_FLAG_NO_MEMORY_LOOPBACK_MAP == 0x00000800);
CHECK(SCI_FLAG_SHARED_MAP == 0x00002000);
CHECK(SCI_FLAG_WRITE_BACK_CACHE_MAP == 0x08000000);
CHECK(SCI_FLAG_PCIE_REQUESTER_GLOBAL == 0x00000001);
CHECK(SCI_FLAG_CACHE_FLUSH == 0x00100000);
CHECK(SCI_FLAG_CACHE_INVALIDATE == 0x00200000);
CHECK(SCI_FLAG_EXCLUSIVE == 0x01000000);
CHECK(SCI_FLAG_DEVICE_SIDE_ONLY == 0x02001000);
CHECK(SCI_FLAG_LOCAL_ONLY == 0x02002000);
CHECK(SCI_FLAG_DEVICE_PREFER_BANDWIDTH == 0x04000001);
CHECK(SCI_FLAG_HOST_PREFER_BANDWIDTH == 0x04000002);
CHECK(SCI_FLAG_SPECIFY_PATH == 0x10000000);
CHECK(SCI_FLAG_SPECIFY_SLOT == 0x20000000);
CHECK(SCI_MEMTYPE_BAR == 1 && SCI_MEMTYPE_PRIVATE == 2 && SCI_MEMTYPE_SHARED == 4);
CHECK(SCI_MEMACCESS_DEVICE_READ == 1 && SCI_MEMACCESS_DEVICE_WRITE == 2);
CHECK(SCI_MEMACCESS_HOST_READ == 4 && SCI_MEMACCESS_HOST_WRITE == 8);
CHECK(SCI_MEMACCESS_MULTIHOST_READ == 0x14 && SCI_MEMACCESS_MULTIHOST_WRITE == 0x18);
CHECK(SCI_MEMACCESS_P2P_READ == 0x21 && SCI_MEMACCESS_P2P_WRITE == 0x22);

/* Layouts, of 64-bit programs. */
CHECK(sizeof(void *) == 8 && sizeof(sci_error_t) == 4 && sizeof(sci_ioaddr_t) == 8);
CHECK(sizeof(sci_address_t) == 8);
CHECK_OFFSET(sci_address_t, offsHi, 2);
CHECK_OFFSET(sci_address_t, offsLo, 4);
CHECK(sizeof(dis_dma_vec_t) == 16);
CHECK_OFFSET(dis_dma_vec_t, size, 0);
CHECK_OFFSET(dis_dma_vec_t, local_offset, 4);
CHECK_OFFSET(dis_dma_vec_t, remote_offset, 8);
CHECK_OFFSET(dis_dma_vec_t, flags, 12);
CHECK(sizeof(dis_nodeId_list_t) >= 8 * sizeof(unsigned int));
CHECK(sizeof(sci_query_string_t) == 16);
CHECK_OFFSET(sci_query_string_t, length, 8);
CHECK(sizeof(sci_query_adapter_t) == 24);
CHECK_OFFSET(sci_query_adapter_t, portNo, 4);
CHECK_OFFSET(sci_query_adapter_t, subcommand, 8);
CHECK_OFFSET(sci_query_adapter_t, data, 16);
CHECK(sizeof(sci_query_system_t) == 16);
CHECK_OFFSET(sci_query_system_t, data, 8);
CHECK(sizeof(sci_query_dma_t) == 16);
CHECK_OFFSET(sci_query_dma_t, subcommand, 4);
CHECK_OFFSET(sci_query_dma_t, data, 8);
CHECK(sizeof(sci_query_local_segment_t) == 24);
CHECK_OFFSET(sci_query_local_segment_t, subcommand, 8);
CHECK_OFFSET(sci_query_local_segment_t, data.ioaddr, 16);
CHECK(sizeof(sci_query_remote_segment_t) == 24);
CHECK_OFFSET(sci_query_remote_segment_t, subcommand, 8);
CHECK_OFFSET(sci_query_remote_segment_t, data.ioaddr, 16);
CHECK(sizeof(sci_query_map_t) == 24);
CHECK_OFFSET(sci_query_map_t, subcommand, 8);
CHECK_OFFSET(sci_query_map_t, data, 16);
CHECK(sizeof(sci_dma_capabilities_t) == 32);
CHECK_OFFSET(sci_dma_capabilities_t, max_transfer_size, 4);
CHECK_OFFSET(sci_dma_capabilities_t, max_vector_length, 8);
CHECK_OFFSET(sci_dma_capabilities_t, support_mem2io, 12);
CHECK_OFFSET(sci_dma_capabilities_t, support_io2mem, 16);
CHECK_OFFSET(sci_dma_capabilities_t, support_io2io, 20);
CHECK_OFFSET(sci_dma_capabilities_t, min_align_bytes, 24);
CHECK_OFFSET(sci_dma_capabilities_t, suggested_align_bytes, 28);
CHECK(sizeof(sci_smartio_device_info_t) == 152);
CHECK_OFFSET(sci_smartio_device_info_t, pci_device_id, 8);
CHECK_OFFSET(sci_smartio_device_info_t, pci_vendor_id, 10);
CHECK_OFFSET(sci_smartio_device_info_t, pci_class, 12);
CHECK_OFFSET(sci_smartio_device_info_t, pci_subsystem_device_id, 16);
CHECK_OFFSET(sci_smartio_device_info_t, pci_subsystem_vendor_id, 18);
CHECK_OFFSET(sci_smartio_device_info_t, pci_serial_number, 24);
CHECK_OFFSET(sci_smartio_device_info_t, remote_bdf, 32);
CHECK_OFFSET(sci_smartio_device_info_t, local_bdf, 34);
CHECK_OFFSET(sci_smartio_device_info_t, adapter, 36);
CHECK_OFFSET(sci_smartio_device_info_t, nodeid, 40);
CHECK_OFFSET(sci_smartio_device_info_t, physical_slot, 44);
CHECK_OFFSET(sci_smartio_device_info_t, user_name, 48);
CHECK_OFFSET(sci_smartio_device_info_t, uuid, 112);

/* What programs define by themselves is left to them; what has two names has both. */
#if defined(NO_FLAGS) || defined(NO_CALLBACK) || defined(NO_ARG) || defined(NO_OFFSET) || \
    defined(SCI_NO_FLAGS) || defined(SCI_NO_CALLBACK)
#error "a name of the programs' own is taken"
#endif
CHECK(SCI_FLAG_NO_MEMORY_LOOPBACK == SCI_FLAG_NO_MEMORY_LOOPBACK_MAP);
CHECK(FLUSH_CPU_BUFFERS_ONLY == SCI_FLAG_FLUSH_CPU_BUFFERS_ONLY);
CHECK(sizeof(sci_device_t) == sizeof(sci_smartio_device_t));

/* Programs write the direction of each parameter, which changes nothing. */
SISCI_API_EXPORT DLL sci_callback_action_t on_segment(void IN *arg, sci_local_segment_t IN segment,
                                                      sci_segment_cb_reason_t OUT reason,
                                                      unsigned int IN_OUT node,
                                                      unsigned int adapter, sci_error_t error);
static const sci_cb_local_segment_t SEGMENT_CALLBACK = on_segment;

sci_callback_action_t on_segment(void *arg, sci_local_segment_t segment,
                                 sci_segment_cb_reason_t reason, unsigned int node,
                                 unsigned int adapter, sci_error_t error)
{
    (void)arg;
    (void)segment;
    (void)node;
    (void)adapter;
    return error == SCI_ERR_OK && reason == SCI_CB_CONNECT ? SCI_CALLBACK_CONTINUE
                                                           : SCI_CALLBACK_CANCEL;
}

/*
 * Programs switch over all errors, so that no two may be alike, but for the pair whose number is
 * one. Compilers say if one is missing here.
 */
static int is_error(sci_error_t error)
{
    switch (error) {
    case SCI_ERR_BUSY:
    case SCI_ERR_FLAG_NOT_IMPLEMENTED:
    case SCI_ERR_ILLEGAL_FLAG:
    case SCI_ERR_NOSPC:
    case SCI_ERR_API_NOSPC:
    case SCI_ERR_HW_NOSPC:
    case SCI_ERR_NOT_IMPLEMENTED:
    case SCI_ERR_ILLEGAL_ADAPTERNO:
    case SCI_ERR_NO_SUCH_ADAPTERNO:
    case SCI_ERR_TIMEOUT:
    case SCI_ERR_OUT_OF_RANGE:
    case SCI_ERR_NO_SUCH_SEGMENT:
    case SCI_ERR_ILLEGAL_NODEID:
    case SCI_ERR_CONNECTION_REFUSED:
    case SCI_ERR_SEGMENT_NOT_CONNECTED:
    case SCI_ERR_SIZE_ALIGNMENT:
    case SCI_ERR_OFFSET_ALIGNMENT:
    case SCI_ERR_ILLEGAL_PARAMETER:
    case SCI_ERR_MAX_ENTRIES:
    case SCI_ERR_SEGMENT_NOT_PREPARED:
    case SCI_ERR_ILLEGAL_ADDRESS:
    case SCI_ERR_ILLEGAL_OPERATION:
    case SCI_ERR_ILLEGAL_QUERY:
    case SCI_ERR_SEGMENTID_USED:
    case SCI_ERR_SYSTEM:
    case SCI_ERR_CANCELLED:
    case SCI_ERR_NOT_CONNECTED:
    case SCI_ERR_NOT_AVAILABLE:
    case SCI_ERR_INCONSISTENT_VERSIONS:
    case SCI_ERR_COND_INT_RACE_PROBLEM:
    case SCI_ERR_OVERFLOW:
    case SCI_ERR_NOT_INITIALIZED:
    case SCI_ERR_ACCESS:
    case SCI_ERR_NOT_SUPPORTED:
    case SCI_ERR_DEPRECATED:
    case SCI_ERR_DMA_NOT_AVAILABLE:
    case SCI_ERR_DMA_DISABLED:
    case SCI_ERR_NO_SUCH_FDID:
    case SCI_ERR_INTNO_USED:
    case SCI_ERR_NO_SUCH_NODEID:
    case SCI_ERR_NODE_NOT_RESPONDING:
    case SCI_ERR_NO_REMOTE_LINK_ACCESS:
    case SCI_ERR_NO_LINK_ACCESS:
    case SCI_ERR_TRANSFER_FAILED:
    case SCI_ERR_EWOULD_BLOCK:
    case SCI_ERR_SEMAPHORE_COUNT_EXCEEDED:
    case SCI_ERR_IRQL_ILLEGAL:
    case SCI_ERR_REMOTE_BUSY:
    case SCI_ERR_LOCAL_BUSY:
    case SCI_ERR_ALL_BUSY:
        return 1;
    case SCI_ERR_OK:
        break;
    }
    return 0;
}

/* Every function that the library exports, and the helpers of demolib. */
typedef void (*function)(void);
#define POINTER(name) (function)name,
static const function FUNCTIONS[] = {
    EVERY_FUNCTION(POINTER)
    (function)QueryAdapter, (function)QuerySystem, (function)DetectFirstAdapterCard,
    (function)GetAdapterType, (function)GetLocalNodeId, (function)GetAdapterSerialNumber,
    (function)GetHostbridgeType, (function)PrintHostbridgeType, (function)GetAPIVersionString,
    (function)GetAdapterIoBusFrequency, (function)GetAdapterSciLinkFrequency,
    (function)GetAdapterBlinkFrequency, (function)SendInterrupt, (function)ReceiveInterrupt,
    (function)EndianSwap, (function)SleepMilliseconds, (function)StartTimer, (function)StopTimer,
};

int main(void)
{
    size_t i;
    for (i = 0; i < sizeof FUNCTIONS / sizeof FUNCTIONS[0]; i++) {
        if (FUNCTIONS[i] == NULL) {
            printf("function %lu is not exported\n", (unsigned long)i);
            return 1;
        }
    }
    if (!is_error(SCI_ERR_BUSY) || is_error(SCI_ERR_OK)) {
        printf("SCI_ERR_BUSY is no error, or SCI_ERR_OK is one\n");
        return 1;
    }
    if (SEGMENT_CALLBACK(NULL, NULL, SCI_CB_CONNECT, 4, 0, SCI_ERR_OK) != SCI_CALLBACK_CONTINUE) {
        printf("a callback's answer is not what it returned\n");
        return 1;
    }
    return 0;
}
