/* The helpers of SISCI's demo programs: see sisci_demolib.h and testlib.h. Becomes demolib.a. */
#define _POSIX_C_SOURCE 200809L

#include "sisci_demolib.h"
#include "testlib.h"

#include <stdio.h>
#include <time.h>

/* Adapters that DetectFirstAdapterCard looks at. */
enum { ADAPTERS = 4 };

sci_error_t QueryAdapter(unsigned int subcommand, unsigned int localAdapterNo, unsigned int portNo,
                         unsigned int *data)
{
    sci_query_adapter_t query;
    sci_error_t error;
    query.subcommand = subcommand;
    query.localAdapterNo = localAdapterNo;
    query.portNo = portNo;
    query.data = data;
    SCIQuery(SCI_Q_ADAPTER, &query, 0, &error);
    return error;
}

sci_error_t QuerySystem(unsigned int subcommand, unsigned int *data)
{
    sci_query_system_t query;
    sci_error_t error;
    query.subcommand = subcommand;
    query.data = data;
    SCIQuery(SCI_Q_SYSTEM, &query, 0, &error);
    return error;
}

sci_error_t DetectFirstAdapterCard(unsigned int *localAdapterNo, unsigned int *localNodeId)
{
    sci_error_t error = SCI_ERR_NO_SUCH_ADAPTERNO;
    unsigned int adapter;
    for (adapter = 0; adapter < ADAPTERS; adapter++) {
        error = GetLocalNodeId(adapter, localNodeId);
        if (error == SCI_ERR_OK) {
            *localAdapterNo = adapter;
            return error;
        }
    }
    return error;
}

sci_error_t GetAdapterType(unsigned int localAdapterNo, unsigned int *type)
{
    return QueryAdapter(SCI_Q_ADAPTER_CARD_TYPE, localAdapterNo, 0, type);
}

sci_error_t GetLocalNodeId(unsigned int localAdapterNo, unsigned int *nodeId)
{
    return QueryAdapter(SCI_Q_ADAPTER_NODEID, localAdapterNo, 0, nodeId);
}

sci_error_t GetAdapterSerialNumber(unsigned int localAdapterNo, unsigned int *serial)
{
    return QueryAdapter(SCI_Q_ADAPTER_SERIAL_NUMBER, localAdapterNo, 0, serial);
}

sci_error_t GetHostbridgeType(unsigned int *type)
{
    return QuerySystem(SCI_Q_SYSTEM_HOSTBRIDGE, type);
}

void PrintHostbridgeType(unsigned int type)
{
    if (type == HOSTBRIDGE_UNKNOWN)
        printf("Host bridge: unknown\n");
    else
        printf("Host bridge: type %u\n", type);
}

sci_error_t GetAPIVersionString(char str[], unsigned int length)
{
    sci_query_string_t query;
    sci_error_t error;
    query.str = str;
    query.length = length;
    SCIQuery(SCI_Q_API, &query, 0, &error);
    return error;
}

sci_error_t GetAdapterIoBusFrequency(unsigned int localAdapterNo, unsigned int *frequency)
{
    return QueryAdapter(SCI_Q_ADAPTER_IO_BUS_FREQUENCY, localAdapterNo, 0, frequency);
}

sci_error_t GetAdapterSciLinkFrequency(unsigned int localAdapterNo, unsigned int *frequency)
{
    return QueryAdapter(SCI_Q_ADAPTER_SCI_LINK_FREQUENCY, localAdapterNo, 0, frequency);
}

sci_error_t GetAdapterBlinkFrequency(unsigned int localAdapterNo, unsigned int *frequency)
{
    return QueryAdapter(SCI_Q_ADAPTER_B_LINK_FREQUENCY, localAdapterNo, 0, frequency);
}

sci_error_t SendInterrupt(sci_desc_t sd, unsigned int localAdapterNo, unsigned int localNodeId,
                          unsigned int remoteNodeId, unsigned int interruptNo)
{
    sci_remote_interrupt_t interrupt;
    sci_error_t error, ignored;
    (void)localNodeId;
    do {
        SCIConnectInterrupt(sd, &interrupt, remoteNodeId, localAdapterNo, interruptNo,
                            SCI_INFINITE_TIMEOUT, 0, &error);
        if (error == SCI_ERR_NO_SUCH_INTNO)
            SleepMilliseconds(1);
    } while (error == SCI_ERR_NO_SUCH_INTNO);
    if (error != SCI_ERR_OK)
        return error;
    SCITriggerInterrupt(interrupt, 0, &error);
    SCIDisconnectInterrupt(interrupt, 0, &ignored);
    return error;
}

sci_error_t ReceiveInterrupt(sci_desc_t sd, unsigned int localAdapterNo, unsigned int localNodeId,
                             unsigned int interruptNo)
{
    sci_local_interrupt_t interrupt;
    sci_error_t error, ignored;
    (void)localNodeId;
    SCICreateInterrupt(sd, &interrupt, localAdapterNo, &interruptNo, NULL, NULL,
                       SCI_FLAG_FIXED_INTNO, &error);
    if (error != SCI_ERR_OK)
        return error;
    SCIWaitForInterrupt(interrupt, SCI_INFINITE_TIMEOUT, 0, &error);
    SCIRemoveInterrupt(interrupt, 0, &ignored);
    return error;
}

unsigned int EndianSwap(unsigned int value)
{
    return value >> 24 | (value >> 8 & 0xff00) | (value << 8 & 0xff0000) | value << 24;
}

void SleepMilliseconds(int milliseconds)
{
    struct timespec time;
    time.tv_sec = milliseconds / 1000;
    time.tv_nsec = (long)(milliseconds % 1000) * 1000000;
    nanosleep(&time, NULL);
}

void StartTimer(timer_start_t *start)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    start->seconds = time.tv_sec;
    start->nanoseconds = time.tv_nsec;
}

double StopTimer(timer_start_t start)
{
    timer_start_t end;
    StartTimer(&end);
    return (double)(end.seconds - start.seconds) * 1e6 +
           (double)(end.nanoseconds - start.nanoseconds) / 1e3;
}
