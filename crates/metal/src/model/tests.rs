//! A model that is isolated for a user of its borrower's VFIO: what it reaches, by which loans, and where its interrupts lead.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rackbus_fabric::{ComponentKind, Fabric, FabricHandle, Topology, TopologyLink};
use rackbus_pci::engine::{Engine, EngineOptions};
use rackbus_pci::vfio_user::EngineDevice;
use rackbus_pci::{Bar, Bus, Function, FunctionInfo, ResetKind, Work};

use super::*;
use crate::isolated::MAPPED_MSI;

const P: u64 = PAGE as u64;
/// Bytes of the window onto the borrower's memory.
const BYTES: u64 = 16 * P;
/// Bytes of window 1: the local APICs are near its end.
const INTERRUPTS: u64 = 64 << 20;
const BOTH: Access = Access::READ.union(Access::WRITE);

/// A function that does nothing by itself, and how often it was reset.
struct Still(FunctionInfo, Arc<AtomicU32>);

impl Function for Still {
    fn info(&self) -> &FunctionInfo {
        &self.0
    }
    fn bar_read(&mut self, _: &Bus<'_>, _: u8, _: u64, _: &mut [u8]) {}
    fn bar_write(&mut self, _: &Bus<'_>, _: u8, _: u64, _: &[u8]) {}
    fn reset(&mut self, _: &Bus<'_>, _: ResetKind) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
    fn poll(&mut self, _: &Bus<'_>) -> Work {
        Work::Asleep(None)
    }
    fn park(&mut self, _: &Bus<'_>) -> bool {
        true
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn quiesce(&mut self, _: &Bus<'_>) {}
}

fn still(resets: Arc<AtomicU32>) -> Box<Still> {
    let bar = Bar { index: 0, size: P, is_64bit: true, prefetchable: false, mappable: None };
    let info = FunctionInfo {
        vendor_id: 1,
        device_id: 2,
        subsystem_vendor_id: 0,
        subsystem_id: 0,
        revision: 0,
        class: [0xff, 0, 0],
        bars: vec![bar],
        msix_vectors: 2,
        msi_vectors: 0,
        vendor: Vec::new(),
        serial: 0,
    };
    Box::new(Still(info, resets))
}

/// A model that is lent all of a borrower's window, the borrower's memory and local APICs.
struct LentModel {
    modelled: ModelledDevice,
    engine: Engine,
    lending: Lending,
    memory: SharedMemory,
    apics: SharedMemory,
    resets: Arc<AtomicU32>,
}

/// The BARs stay as they are.
struct SameBars;

impl LentBars for SameBars {
    fn end_bars(&mut self) -> Result<(), MetalError> {
        panic!("the registers of a model stay where they are");
    }

    fn lend_bars(&mut self, _bars: Vec<BarMap>) -> Result<(), MetalError> {
        panic!("the registers of a model stay where they are");
    }
}

impl LentModel {
    fn new() -> LentModel {
        LentModel::by(Lending::alone())
    }

    fn by(lending: Lending) -> LentModel {
        let resets = Arc::<AtomicU32>::default();
        let engine = Engine::start("still", still(resets.clone()), EngineOptions::default());
        let engine = engine.unwrap();
        let device = EngineDevice::new(engine.handle().clone()).unwrap();
        let device = device.session_of(lending.clone(), None).unwrap();
        let memory = SharedMemory::create("borrower", BYTES).unwrap();
        let plan = WindowPlan::new(INTERRUPTS, INTERRUPTS, BYTES).unwrap();
        let (vectors, apics) = LentVectors::in_memory(2, plan.interrupts.clone());
        let window = ModelWindow { plan, memory: memory.handle(0) };
        window.lend_whole(&device).unwrap();
        let config = device.read(DeviceRegion::Config, 0, PAGE).unwrap();
        let msix_control = image::of(&config).unwrap().writable.msix_control;
        let table = lending.share_bar(4, (0, 2 * P)).unwrap();
        let parts = (Box::new(device) as _, engine.handle().revoker().clone(), table);
        let reached = (window, lending.clone());
        let modelled = ModelledDevice::serving("m0", parts, reached, vectors, msix_control);
        let modelled = modelled.unwrap();
        modelled.answer().unwrap();
        LentModel { modelled, engine, lending, memory, apics, resets }
    }

    fn isolate(&self, on: bool) {
        self.modelled.isolate(on, &mut SameBars).unwrap();
        self.modelled.set_master(true).unwrap();
    }

    fn map(
        &self,
        iova: u64,
        offset: u64,
        size: u64,
        access: Access,
    ) -> Result<IsolatedMapping, MappingRefusal> {
        let mapping = IsolatedMapping { iova, offset, size, access };
        self.modelled.map(&mapping).map(|()| mapping)
    }

    /// What it writes there by DMA arrives, or is refused.
    fn writes(&self, iova: u64, byte: u8) -> bool {
        let engine = self.engine.handle();
        engine.call(move |endpoint| endpoint.dma().write(iova, &[byte]).is_ok()).unwrap()
    }

    fn reads(&self, iova: u64) -> bool {
        let engine = self.engine.handle();
        engine.call(move |endpoint| endpoint.dma().read(iova, &mut [0]).is_ok()).unwrap()
    }

    fn byte(&self, offset: u64) -> u8 {
        self.memory.whole().read_obj(offset as usize).unwrap()
    }

    /// Where its loans of the borrower's memory begin, how long they are, and what it may do there, as the fabric has them.
    fn loans(&self) -> Vec<(u64, u64, Access)> {
        let reached = self.lending.fabric().with(|fabric| fabric.reached("host/function").unwrap());
        reached.iter().map(|loan| (loan.address, loan.length, loan.access)).collect()
    }

    fn refusals(&self) -> u64 {
        self.engine.handle().refusals().get().0
    }

    fn plan(&self) -> &WindowPlan {
        &self.modelled.window.plan
    }

    /// The word at this offset of the local APICs, once it is not `before`.
    fn word_after(&self, at: u64, before: u32) -> u32 {
        let apics = self.plan().local_apics().unwrap();
        let begun = Instant::now();
        loop {
            let word = self.apics.whole().load_u32((apics + at) as usize, Ordering::Acquire);
            match word {
                Some(word) if word != before => return word,
                _ => assert!(begun.elapsed() < Duration::from_secs(20), "no interrupt came"),
            }
            std::thread::yield_now();
        }
    }
}

#[test]
fn an_isolated_model_reaches_what_is_mapped_each_by_a_loan_of_its_own_and_nothing_else() {
    let lent = LentModel::new();
    let whole = lent.plan().memory.start;
    lent.modelled.set_master(true).unwrap();
    assert_eq!(lent.loans(), [(whole, BYTES, BOTH)]);
    assert!(lent.writes(whole + P, 1));
    assert_eq!(lent.byte(P), 1);

    lent.isolate(true);
    assert_eq!(lent.loans(), []);
    assert!(!lent.writes(whole + P, 2) && !lent.writes(P, 2));
    let first = lent.map(0, 4 * P, 2 * P, BOTH).unwrap();
    lent.map(1 << 40, 9 * P, P, Access::READ).unwrap();
    assert_eq!(lent.loans(), [(0, 2 * P, BOTH), (1 << 40, P, Access::READ)]);
    assert!(lent.writes(P, 3) && lent.reads(1 << 40));
    assert_eq!(lent.byte(5 * P), 3);
    let before = lent.refusals();
    assert!(!lent.writes(1 << 40, 4) && !lent.writes(2 * P, 4) && !lent.writes(whole, 4));
    assert!(!lent.writes(MAPPED_MSI, 4), "a model's interrupts are no DMA");
    assert_eq!(lent.refusals(), before + 4, "not every refused access is counted");

    lent.modelled.unmap(&first).unwrap();
    assert!(!lent.writes(P, 5) && !lent.reads(0));
    assert_eq!((lent.byte(5 * P), lent.loans()), (3, vec![(1 << 40, P, Access::READ)]));
    assert!(lent.modelled.unmap(&first).is_err(), "what has ended is ended again");

    // It was reset, and has all of the window again.
    let resets = lent.resets.load(Ordering::Relaxed);
    lent.isolate(false);
    assert!(lent.resets.load(Ordering::Relaxed) > resets);
    assert_eq!(lent.loans(), [(whole, BYTES, BOTH)]);
    assert!(lent.writes(whole, 6) && !lent.reads(1 << 40));
}

#[test]
fn a_mapping_that_the_models_process_cannot_have_is_refused_and_changes_nothing() {
    let lent = LentModel::new();
    lent.isolate(true);
    assert!(lent.modelled.may_isolate().is_ok() && lent.modelled.most_mappings() > 0);
    // Of all machines: where the system lets processes have more, a table of an isolated function ends before the model's.
    let most = max_mappings() as u64;
    for page in 0..most {
        lent.map(page * P, (page % 16) * P, P, BOTH).unwrap();
    }
    assert!(u64::from(lent.modelled.most_mappings()) <= most);
    assert_eq!(lent.map(most * P, 0, P, BOTH), Err(MappingRefusal::TooMany));
    assert_eq!(lent.loans().len() as u64, most);
}

#[test]
fn what_is_revoked_is_lent_no_more_and_nothing_is_mapped_after_that() {
    let lent = LentModel::new();
    lent.isolate(true);
    lent.map(0, 0, P, BOTH).unwrap();
    assert!(lent.writes(0, 1));
    lent.modelled.cut();
    assert!(!lent.reads(0));
    assert_eq!(lent.loans(), []);
    assert_eq!(lent.map(P, P, P, BOTH), Err(MappingRefusal::Failed));
    assert!(!lent.reads(P));
    assert_eq!(lent.loans(), []);
}

/// Its borrower has little more memory than the window covers.
#[test]
fn the_window_is_kept_for_a_model_that_is_isolated_whatever_else_is_lent() {
    let mut topology = Topology::new();
    let host = topology.add_host("host", BYTES + P, true).unwrap();
    let function = topology.add(Some(host), ComponentKind::Device, "host/function").unwrap();
    topology.connect(topology.host(host).root, function, TopologyLink::Internal).unwrap();
    let fabric = FabricHandle::new(Fabric::new(topology));
    let lent = LentModel::by(fabric.lending("host/function", "host").unwrap());
    let other = SharedMemory::create("other", 2 * P).unwrap();
    let others = |bytes| lent.lending.count(&other.handle(0), bytes).map(drop);
    lent.isolate(true);
    lent.map(0, 0, P, BOTH).unwrap();
    others(P).unwrap();
    assert!(others(2 * P).is_err(), "the window was lent to somebody else");
    lent.isolate(false);
    assert_eq!(lent.loans(), [(lent.plan().memory.start, BYTES, BOTH)]);
    lent.isolate(true);
    lent.modelled.cut();
    others(2 * P).unwrap();
}

#[test]
fn interrupts_of_an_isolated_model_reach_the_local_apics_by_its_own_addresses() {
    let lent = LentModel::new();
    let vectors = lent.modelled.vectors.clone();
    let entry = |address: u64, data| [address as u32, (address >> 32) as u32, data, 0];
    let msi = lent.plan().msi_base();
    vectors.set(0, entry(msi + 0x20, 33));
    vectors.event(0).ring();
    assert_eq!(lent.word_after(0x20, 0), 33);

    lent.isolate(true);
    // Masked by the reset, as each entry is.
    vectors.set(0, entry(msi + 0x20, 34));
    vectors.event(0).ring();
    vectors.set(1, entry(MAPPED_MSI + 0x40, 35));
    vectors.event(1).ring();
    assert_eq!(lent.word_after(0x40, 0), 35);
    assert_eq!(lent.word_after(0x20, 0), 33, "by an address that it does not reach");

    lent.isolate(false);
    vectors.set(1, entry(msi + 0x40, 36));
    vectors.event(1).ring();
    assert_eq!(lent.word_after(0x40, 35), 36);
}
