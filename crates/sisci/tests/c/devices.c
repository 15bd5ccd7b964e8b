/*
 * Borrowed devices: what is refused, and with which error. It runs on beta of a rack in which alpha has a
 * drive, nvme0, and gamma a memory function, ram0.
 */
#include <string.h>

#include "scenario.h"

enum { ALPHA = 4, GAMMA = 12, SIZE = 8192, DRIVES = 0x010802, MEMORY_BAR = 2 };

static sci_smartio_device_info_t none(void)
{
    sci_smartio_device_info_t filter;
    memset(&filter, 0, sizeof filter);
    return filter;
}

/* The only device that is like the filter. */
static unsigned long long only(sci_desc_t sd, const sci_smartio_device_info_t *filter)
{
    unsigned long long fdids[4];
    size_t found;
    TRY(found = SCIGetDeviceList(sd, fdids, 4, filter, 0, &error));
    CHECK(found == 1);
    return fdids[0];
}

static void lists(sci_desc_t sd, unsigned long long *drive, unsigned long long *memory)
{
    sci_smartio_device_info_t filter = none(), info;
    sci_smartio_query_device_t query;
    unsigned long long fdids[4] = {1, 2, 3, 4};
    size_t found;
    TRY(found = SCIGetDeviceList(sd, NULL, 0, NULL, 0, &error));
    CHECK(found == 2);
    TRY(found = SCIGetDeviceList(sd, fdids, 1, NULL, 0, &error));
    CHECK(found == 1 && fdids[1] == 2);
    TRY(found = SCIGetDeviceList(sd, fdids, 0, NULL, 0, &error));
    CHECK(found == 0);
    filter.pci_class = DRIVES;
    *drive = only(sd, &filter);
    filter = none();
    filter.nodeid = GAMMA;
    *memory = only(sd, &filter);
    filter = none();
    strcpy(filter.user_name, "alpha/nvme0");
    CHECK(only(sd, &filter) == *drive);
    filter.nodeid = GAMMA;
    TRY(found = SCIGetDeviceList(sd, fdids, 4, &filter, 0, &error));
    CHECK(found == 0);
    REFUSED(SCI_ERR_ILLEGAL_FLAG, SCIGetDeviceList(sd, fdids, 4, NULL, 1, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIGetDeviceList(NULL, fdids, 4, NULL, 0, &error));

    memset(&query, 0, sizeof query);
    query.fdid = *drive;
    query.subcommand = SCI_Q_DEVICE_INFO;
    query.data = &info;
    TRY(SCIQuery(SCI_Q_DEVICE, &query, 0, &error));
    CHECK(info.fdid == *drive && info.nodeid == ALPHA && info.pci_class == DRIVES);
    CHECK(strcmp(info.user_name, "alpha/nvme0") == 0);
    query.fdid = 7;
    REFUSED(SCI_ERR_NO_SUCH_FDID, SCIQuery(SCI_Q_DEVICE, &query, 0, &error));
    query.subcommand = 7;
    REFUSED(SCI_ERR_ILLEGAL_QUERY, SCIQuery(SCI_Q_DEVICE, &query, 0, &error));
}

static void borrows(sci_desc_t sd, unsigned long long drive, sci_smartio_device_t *device)
{
    sci_smartio_device_t other;
    REFUSED(SCI_ERR_NO_SUCH_FDID, SCIBorrowDevice(sd, &other, 7, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_FLAG, SCIBorrowDevice(sd, &other, drive, SCI_FLAG_EMPTY, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIBorrowDevice(NULL, &other, drive, 0, &error));
    TRY(SCIBorrowDevice(sd, device, drive, SCI_FLAG_EXCLUSIVE, &error));
    REFUSED(SCI_ERR_BUSY, SCIBorrowDevice(sd, &other, drive, 0, &error));
    CHECK(SCIGetFabricDeviceId(*device) == drive);
    CHECK(SCIGetFabricDeviceId(NULL) == 0);
    REFUSED(SCI_ERR_NOT_SUPPORTED, SCIReleaseExclusiveBorrow(*device, 0, &error));
    REFUSED(SCI_ERR_BUSY, SCIClose(sd, 0, &error));
}

static void connects(sci_desc_t sd, sci_smartio_device_t device)
{
    sci_remote_segment_t segment;
    sci_map_t map;
    volatile uint32_t *registers;
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIConnectDeviceSegment(device, &segment, 1, SCI_MEMTYPE_BAR, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIConnectDeviceSegment(device, &segment, 6, SCI_MEMTYPE_BAR, NULL, NULL, 0, &error));
    /* The table of MSI-X is emulated by whoever uses the function. */
    REFUSED(SCI_ERR_NOT_SUPPORTED,
            SCIConnectDeviceSegment(device, &segment, 4, SCI_MEMTYPE_BAR, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_SEGMENT,
            SCIConnectDeviceSegment(device, &segment, 1, SCI_MEMTYPE_PRIVATE, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCIConnectDeviceSegment(device, &segment, 0, 3, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_FLAG_NOT_IMPLEMENTED,
            SCIConnectDeviceSegment(device, &segment, 0, SCI_MEMTYPE_BAR, NULL, NULL,
                                    SCI_FLAG_USE_CALLBACK, &error));
    REFUSED(SCI_ERR_NO_SUCH_ADAPTERNO,
            SCIConnectDeviceSegmentPath(device, &segment, 0, SCI_MEMTYPE_BAR, 1, NULL, NULL,
                                        SCI_FLAG_SPECIFY_PATH, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCIConnectDeviceMemory(sd, &segment, 0, device, 0, 1, SCI_FLAG_BAR, &error));
    TRY(SCIConnectDeviceSegmentPath(device, &segment, 0, SCI_MEMTYPE_BAR, 0, NULL, NULL,
                                    SCI_FLAG_SPECIFY_PATH, &error));
    CHECK(SCIGetRemoteSegmentNodeId(segment) == ALPHA && SCIGetRemoteSegmentId(segment) == 0);
    REFUSED(SCI_ERR_BUSY, SCIReturnDevice(device, 0, &error));
    TRY(registers = (volatile uint32_t *)SCIMapRemoteSegment(
            segment, &map, 0, SCIGetRemoteSegmentSize(segment), NULL, 0, &error));
    CHECK(registers[0] != 0 && registers[0] != 0xffffffffU);
    REFUSED(SCI_ERR_BUSY, SCIDisconnectSegment(segment, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(segment, 0, &error));
}

static void maps(sci_desc_t sd, sci_smartio_device_t device)
{
    sci_local_segment_t local;
    sci_ioaddr_t one = 0, other = 0;
    TRY(SCICreateSegment(sd, &local, 77, SIZE, NULL, NULL, 0, &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMapLocalSegmentForDevice(local, 0, device, &one, 1, SIZE, 0, &error));
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMapLocalSegmentForDevice(local, 0, device, &one, (size_t)-1, 2, 0, &error));
    REFUSED(SCI_ERR_SIZE_ALIGNMENT,
            SCIMapLocalSegmentForDevice(local, 0, device, &one, 0, 0, 0, &error));
    REFUSED(SCI_ERR_NO_SUCH_ADAPTERNO,
            SCIMapLocalSegmentForDevice(local, 1, device, &one, 0, SIZE, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCIMapLocalSegmentForDevice(local, 0, NULL, &one, 0, SIZE, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_FLAG,
            SCIMapLocalSegmentForDevice(local, 0, device, &one, 0, SIZE, 1, &error));
    REFUSED(SCI_ERR_ILLEGAL_OPERATION,
            SCIUnmapLocalSegmentForDevice(local, 0, device, 0, &error));
    TRY(SCIMapLocalSegmentForDevice(local, 0, device, &one, 0, SIZE, 0, &error));
    TRY(SCIMapLocalSegmentForDevice(local, 0, device, &other, 5000, 10, 0, &error));
    CHECK(one != other && one % 4096 == 0 && other % 4096 == 5000 % 4096);
    REFUSED(SCI_ERR_BUSY, SCIRemoveSegment(local, 0, &error));
    REFUSED(SCI_ERR_BUSY, SCIReturnDevice(device, 0, &error));
    TRY(SCIUnmapLocalSegmentForDevice(local, 0, device, 0, &error));
    TRY(SCIRemoveSegment(local, 0, &error));
}

/* Memory that is made for the device: the program and the device have it. */
static void creates(sci_smartio_device_t device)
{
    sci_remote_segment_t segment, again;
    sci_map_t map, second;
    volatile uint32_t *words, *same;
    sci_ioaddr_t address = 0;
    unsigned int both = SCI_MEMACCESS_DEVICE_READ | SCI_MEMACCESS_HOST_WRITE;
    REFUSED(SCI_ERR_NOT_SUPPORTED,
            SCICreateDeviceSegment(device, 5, SIZE, SCI_MEMTYPE_SHARED, both, SCI_FLAG_DEVICE_SIDE_ONLY,
                                   &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCICreateDeviceSegment(device, 5, SIZE, SCI_MEMTYPE_BAR, both, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER,
            SCICreateDeviceSegment(device, 5, SIZE, SCI_MEMTYPE_SHARED, 0x1000, 0, &error));
    REFUSED(SCI_ERR_SIZE_ALIGNMENT,
            SCICreateDeviceSegment(device, 5, 0, SCI_MEMTYPE_SHARED, both, 0, &error));
    TRY(SCICreateDeviceSegment(device, 5, SIZE, SCI_MEMTYPE_PRIVATE, both, SCI_FLAG_LOCAL_ONLY, &error));
    REFUSED(SCI_ERR_SEGMENTID_USED,
            SCICreateDeviceSegment(device, 5, SIZE, SCI_MEMTYPE_SHARED, both, 0, &error));
    TRY(SCIConnectDeviceSegment(device, &segment, 5, SCI_MEMTYPE_PRIVATE, NULL, NULL, 0, &error));
    TRY(SCIConnectDeviceSegment(device, &again, 5, SCI_MEMTYPE_PRIVATE, NULL, NULL, 0, &error));
    CHECK(SCIGetRemoteSegmentSize(segment) == SIZE);
    TRY(words = (volatile uint32_t *)SCIMapRemoteSegment(segment, &map, 0, SIZE, NULL, 0, &error));
    TRY(same = (volatile uint32_t *)SCIMapRemoteSegment(again, &second, 0, SIZE, NULL, 0, &error));
    words[100] = 12345;
    CHECK(same[100] == 12345);
    TRY(SCIUnmapSegment(second, 0, &error));
    TRY(SCIDisconnectSegment(again, 0, &error));
    words[101] = 54321;
    CHECK(words[100] == 12345 && words[101] == 54321);
    TRY(SCIMapRemoteSegmentForDevice(segment, device, &address, 0, SIZE, 0, &error));
    CHECK(address != 0);
    REFUSED(SCI_ERR_BUSY, SCIReturnDevice(device, 0, &error));
    TRY(SCIUnmapRemoteSegmentForDevice(segment, device, 0, &error));
    TRY(SCIUnmapSegment(map, 0, &error));
    TRY(SCIDisconnectSegment(segment, 0, &error));
}

/* Another device's memory, and what is none. */
static void peers(sci_desc_t sd, sci_smartio_device_t drive, unsigned long long fdid)
{
    sci_smartio_device_t memory;
    sci_remote_segment_t bar, registers;
    sci_ioaddr_t address = 0, again = 0;
    TRY(SCIBorrowDevice(sd, &memory, fdid, 0, &error));
    if (scenario_between_machines()) {
        /* Each access to it is a message. */
        REFUSED(SCI_ERR_NOT_SUPPORTED,
                SCIConnectDeviceMemory(sd, &bar, 0, memory, MEMORY_BAR, 0, SCI_FLAG_BAR, &error));
        TRY(SCIReturnDevice(memory, 0, &error));
        return;
    }
    TRY(SCIConnectDeviceMemory(sd, &bar, 0, memory, MEMORY_BAR, 0, SCI_FLAG_BAR, &error));
    CHECK(SCIGetRemoteSegmentNodeId(bar) == GAMMA && SCIGetRemoteSegmentSize(bar) == 4U << 20);
    REFUSED(SCI_ERR_OUT_OF_RANGE,
            SCIMapRemoteSegmentForDevice(bar, drive, &address, 4U << 20, 1, 0, &error));
    REFUSED(SCI_ERR_NOT_SUPPORTED,
            SCIMapRemoteSegmentForDevice(bar, memory, &address, 0, SIZE, 0, &error));
    TRY(SCIMapRemoteSegmentForDevice(bar, drive, &address, 0, SIZE, 0, &error));
    TRY(SCIMapRemoteSegmentForDevice(bar, drive, &again, 12, SIZE, 0, &error));
    CHECK(again == address + 12);
    REFUSED(SCI_ERR_BUSY, SCIDisconnectSegment(bar, 0, &error));
    TRY(SCIUnmapRemoteSegmentForDevice(bar, drive, 0, &error));
    TRY(SCIConnectDeviceMemory(sd, &registers, 0, drive, 0, 0, SCI_FLAG_BAR, &error));
    REFUSED(SCI_ERR_NOT_SUPPORTED,
            SCIMapRemoteSegmentForDevice(registers, memory, &address, 0, SIZE, 0, &error));
    TRY(SCIDisconnectSegment(registers, 0, &error));
    TRY(SCIDisconnectSegment(bar, 0, &error));
    TRY(SCIReturnDevice(memory, 0, &error));
    REFUSED(SCI_ERR_ILLEGAL_PARAMETER, SCIReturnDevice(memory, 0, &error));
}

int main(int argc, char **argv)
{
    struct scenario scenario;
    sci_smartio_device_t device;
    unsigned long long drive, memory;
    scenario_begin(&scenario, argc, argv);
    lists(scenario.sd, &drive, &memory);
    borrows(scenario.sd, drive, &device);
    connects(scenario.sd, device);
    maps(scenario.sd, device);
    creates(device);
    peers(scenario.sd, device, memory);
    TRY(SCIReturnDevice(device, 0, &error));
    /* At once for the next one; and what is not returned goes back with the library. */
    TRY(SCIBorrowDevice(scenario.sd, &device, drive, 0, &error));
    TRY(SCIReturnDevice(device, 0, &error));
    TRY(SCIBorrowDevice(scenario.sd, &device, drive, 0, &error));
    SCITerminate();
    return 0;
}
