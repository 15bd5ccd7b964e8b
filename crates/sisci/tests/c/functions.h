/* The name of every function of the library: EVERY_FUNCTION(X) is X(name) for each. */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H

#define EVERY_FUNCTION(X) \
    X(SCIInitialize) X(SCITerminate) X(SCIOpen) X(SCIClose) X(SCIQuery) X(SCIGetLocalNodeId) \
    X(SCIGetNodeIdByAdapterName) X(SCIGetNodeInfoByAdapterName) X(SCIGetErrorString) \
    X(SCIGetAdapterTypeString) X(SCIGetAdapterFamilyString) X(SCIProbeNode) \
    X(SCIGetCSRRegister) X(SCISetCSRRegister) X(SCIGetLocalCSR) X(SCISetLocalCSR) \
    X(SCICreateSegment) X(SCIPrepareSegment) X(SCIMapLocalSegment) X(SCISetSegmentAvailable) \
    X(SCISetSegmentUnavailable) X(SCIRemoveSegment) X(SCIGetLocalSegmentSize) \
    X(SCIGetLocalSegmentId) X(SCIWaitForLocalSegmentEvent) X(SCIShareSegment) \
    X(SCIAttachLocalSegment) X(SCIRegisterSegmentMemory) X(SCIAttachPhysicalMemory) \
    X(SCIConnectSegment) X(SCIDisconnectSegment) X(SCIGetRemoteSegmentSize) \
    X(SCIGetRemoteSegmentId) X(SCIGetRemoteSegmentNodeId) X(SCIWaitForRemoteSegmentEvent) \
    X(SCIMapRemoteSegment) X(SCIUnmapSegment) X(SCIGetMapPointer) X(SCIGetMapPhysAddr) \
    X(SCIConnectSCISpace) X(SCICreateMapSequence) X(SCIRemoveSequence) X(SCIStartSequence) \
    X(SCICheckSequence) X(SCIStoreBarrier) X(SCIFlush) X(SCIMemCpy) X(SCIMemCpy_dual) \
    X(SCIMemWrite) X(SCICacheSync) X(GetSciMemCopyFunction) X(SetSciMemCopyFunction) \
    X(SCIFlushReadBuffers) X(SCIMemCopy) X(SCITransferBlock) X(SCITransferBlockAsync) \
    X(SCIWaitForBlockTransfer) X(SCIAbortBlockTransfer) X(SCICreateDMAQueue) \
    X(SCIRemoveDMAQueue) X(SCIAbortDMAQueue) X(SCIDMAQueueState) X(SCIWaitForDMAQueue) \
    X(SCIStartDmaTransfer) X(SCIStartDmaTransferMem) X(SCIStartDmaTransferVec) \
    X(DISStartDmaTransfer) X(DISStartDmaTransferVec) X(SCIRequestDMAChannel) \
    X(SCIAssignDMAChannel) X(SCIReturnDMAChannel) X(SCIPrepareLocalSegmentForDMA) \
    X(SCIUnprepareLocalSegmentForDMA) X(SCIPrepareRemoteSegmentForDMA) \
    X(SCIUnprepareRemoteSegmentForDMA) X(SCIEnqueueDMATransfer) X(SCIPostDMAQueue) \
    X(SCIResetDMAQueue) X(SCIphDmaEnqueue) X(SCIphDmaStart) X(SCICreateInterrupt) \
    X(SCICreateNamedInterrupt) X(SCIRemoveInterrupt) X(SCIWaitForInterrupt) \
    X(SCIConnectInterrupt) X(SCIDisconnectInterrupt) X(SCITriggerInterrupt) \
    X(SCICreateDataInterrupt) X(SCIRemoveDataInterrupt) X(SCIWaitForDataInterrupt) \
    X(SCIConnectDataInterrupt) X(SCIDisconnectDataInterrupt) X(SCITriggerDataInterrupt) \
    X(SCIRegisterInterruptFlag) X(SCIEnableConditionalInterrupt) \
    X(SCIDisableConditionalInterrupt) X(SCIGetConditionalInterruptTrigCounter) \
    X(SCIRegisterPCIeRequester) X(SCIUnregisterPCIeRequester) X(SCIGetDeviceList) \
    X(SCIBorrowDevice) X(SCIReturnDevice) X(SCIReleaseExclusiveBorrow) X(SCIGetFabricDeviceId) \
    X(SCIConnectDeviceSegment) X(SCIConnectDeviceSegmentPath) X(SCIConnectDeviceMemory) \
    X(SCICreateDeviceSegment) X(SCIMapLocalSegmentForDevice) X(SCIMapRemoteSegmentForDevice) \
    X(SCIUnmapLocalSegmentForDevice) X(SCIUnmapRemoteSegmentForDevice)

#endif
