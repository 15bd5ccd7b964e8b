//! Functions that are taken and given back, in a tree that is made up.

use super::*;
use crate::facts::tests::Tree;

/// A tree in which nothing happens when a file is written, as in a kernel that refuses everything.
fn deaf() -> (Tree, Bindings) {
    let tree = Tree::new();
    tree.function("0000:03:00.0", "0x010802\n", 7, Some("nvme"));
    tree.write("sys/bus/pci/drivers/vfio-pci/unbind", "");
    let notes = tree.0.path().join("notes");
    let bindings = Bindings::of(tree.sysfs(), &notes);
    (tree, bindings)
}

fn rebound(tree: &Tree, driver: &str) {
    let link = tree.0.path().join("sys/devices/pci0000:00/0000:03:00.0/driver");
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(tree.sysfs().driver(driver), link).unwrap();
}

fn text(tree: &Tree, path: &str) -> String {
    fs::read_to_string(tree.0.path().join(path)).unwrap()
}

#[test]
fn a_function_whose_driver_does_not_release_it_is_refused_and_what_was_changed_is_taken_back() {
    let (tree, bindings) = deaf();
    let address = "03:00.0".parse().unwrap();
    let refused = bindings.take(address, "alpha", false).unwrap_err();
    let VfioError::NotBound { found, .. } = refused else { panic!("{refused}") };
    assert_eq!(found, "nvme");
    assert_eq!(text(&tree, "sys/devices/pci0000:00/0000:03:00.0/driver_override"), "\n");
    assert_eq!(text(&tree, "sys/bus/pci/drivers/nvme/unbind"), "0000:03:00.0");
    assert!(bindings.taken().unwrap().is_empty());
}

#[test]
fn the_record_names_the_driver_to_go_back_to_also_for_another_process() {
    let (tree, bindings) = deaf();
    let address = "03:00.0".parse().unwrap();
    let facts = tree.sysfs().facts(address).unwrap();
    let taken = Binding {
        address,
        kind: facts.kind().to_owned(),
        former: facts.driver,
        virtual_functions: 0,
        taker: "alpha".to_owned(),
        process: None,
    };
    bindings.write_note(&taken).unwrap();
    rebound(&tree, "vfio-pci");
    let later = Bindings::of(tree.sysfs(), &tree.0.path().join("notes"));
    assert_eq!(later.taken().unwrap(), std::slice::from_ref(&taken));
    // Taking it again changes who has it, and nothing else.
    let again = later.take(address, "beta", false).unwrap();
    let process = TakerProcess::this();
    assert_eq!(again.binding, Binding { taker: "beta".to_owned(), process, ..taken.clone() });
    later.undo(again).unwrap();
    assert_eq!(later.taken().unwrap(), std::slice::from_ref(&taken));
    // The driver does not take it: the note stays.
    assert!(matches!(later.give_back(address), Err(VfioError::NotBound { .. })));
    assert_eq!(later.taken().unwrap().len(), 1);
    rebound(&tree, "nvme");
    assert_eq!(later.give_back(address).unwrap().unwrap().former.as_deref(), Some("nvme"));
    assert!(later.taken().unwrap().is_empty());
    assert_eq!(later.give_back(address).unwrap(), None);
}

/// A node that starts while the command is in the middle of taking the function.
#[test]
fn a_function_that_another_process_is_taking_is_found_taken() {
    let (tree, bindings) = deaf();
    let address: PciAddress = "03:00.0".parse().unwrap();
    let facts = tree.sysfs().facts(address).unwrap();
    let first = NotesLock::take(&bindings.notes).unwrap();
    std::thread::scope(|scope| {
        let (begins, begun) = std::sync::mpsc::channel();
        let of_second = bindings.clone();
        let second = scope.spawn(move || {
            begins.send(()).unwrap();
            of_second.take(address, "beta", false)
        });
        begun.recv().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!second.is_finished() && bindings.taken().unwrap().is_empty());
        let taken = Binding {
            address,
            kind: facts.kind().to_owned(),
            former: facts.driver.clone(),
            virtual_functions: 0,
            taker: "alpha".to_owned(),
            process: TakerProcess::this(),
        };
        bindings.write_note(&taken).unwrap();
        rebound(&tree, "vfio-pci");
        drop(first);
        let refused = second.join().unwrap().unwrap_err();
        assert!(matches!(refused, VfioError::TakenBy { .. }), "{refused}");
        assert_eq!(bindings.note(address).unwrap(), Some(taken));
    });
}

#[test]
fn what_was_bound_to_vfio_before_stays_so() {
    let (tree, bindings) = deaf();
    rebound(&tree, "vfio-pci");
    let address = "03:00.0".parse().unwrap();
    assert_eq!(bindings.take(address, "alpha", false).unwrap().binding.former, None);
    assert_eq!(bindings.give_back(address).unwrap(), None);
    assert_eq!(text(&tree, "sys/bus/pci/drivers/vfio-pci/unbind"), "");
}

#[test]
fn virtual_functions_are_made_within_what_the_function_can_have() {
    let (tree, bindings) = deaf();
    let folder = "sys/devices/pci0000:00/0000:03:00.0";
    tree.write(&format!("{folder}/sriov_totalvfs"), "2\n");
    let address = "03:00.0".parse().unwrap();
    let refused = bindings.make_virtual(address, 3, "alpha").unwrap_err().to_string();
    assert!(refused.contains("can have 2 virtual functions, not 3"), "{refused}");
    assert_eq!(bindings.make_virtual(address, 2, "alpha").unwrap(), []);
    assert_eq!(text(&tree, &format!("{folder}/sriov_numvfs")), "2");
    assert_eq!(text(&tree, &format!("{folder}/sriov_drivers_autoprobe")), "0");
    bindings.give_back(address).unwrap();
    assert_eq!(text(&tree, &format!("{folder}/sriov_drivers_autoprobe")), "1");
}

/// A card with two virtual functions, the first of which has a network interface in this state.
fn card_with_two(state: &str) -> (Tree, Bindings) {
    let tree = Tree::new();
    tree.function("0000:04:00.0", "0x020000\n", 7, Some("igb"));
    let folder = "sys/devices/pci0000:00/0000:04:00.0";
    tree.write(&format!("{folder}/sriov_totalvfs"), "8\n");
    tree.write(&format!("{folder}/sriov_numvfs"), "2\n");
    tree.write(&format!("{folder}/sriov_drivers_autoprobe"), "1\n");
    let path = tree.0.path().join("sys/devices/pci0000:00");
    for (number, name) in ["0000:04:10.0", "0000:04:10.2"].into_iter().enumerate() {
        tree.function(name, "0x020000\n", 8 + number as u32, Some("igbvf"));
        let link = path.join(format!("0000:04:00.0/virtfn{number}"));
        std::os::unix::fs::symlink(path.join(name), link).unwrap();
    }
    tree.write("sys/devices/pci0000:00/0000:04:10.0/net/eth5/operstate", state);
    tree.write("sys/bus/pci/drivers/vfio-pci/unbind", "");
    let bindings = Bindings::of(tree.sysfs(), &tree.0.path().join("notes"));
    (tree, bindings)
}

#[test]
fn virtual_functions_that_are_in_use_are_not_removed() {
    let (tree, bindings) = card_with_two("up\n");
    let card = "04:00.0".parse().unwrap();
    for wanted in [2, 4] {
        let refused = bindings.make_virtual(card, wanted, "alpha").unwrap_err();
        assert!(matches!(refused, VfioError::InUse { .. }), "{refused}");
        let folder = "sys/devices/pci0000:00/0000:04:00.0";
        assert_eq!(text(&tree, &format!("{folder}/sriov_numvfs")), "2\n");
        assert_eq!(text(&tree, &format!("{folder}/sriov_drivers_autoprobe")), "1\n");
        assert!(bindings.taken().unwrap().is_empty());
    }
}

#[test]
fn what_another_taker_has_that_runs_is_not_taken_and_stays_with_it() {
    let (tree, bindings) = deaf();
    let address = "03:00.0".parse().unwrap();
    let note = Binding {
        address,
        kind: "NVMe drive".to_owned(),
        former: Some("nvme".to_owned()),
        virtual_functions: 0,
        taker: "node of alpha".to_owned(),
        process: TakerProcess::this(),
    };
    bindings.write_note(&note).unwrap();
    rebound(&tree, "vfio-pci");
    for force in [false, true] {
        let refused = bindings.take(address, "rackbus metal lend", force).unwrap_err();
        assert!(matches!(refused, VfioError::TakenBy { .. }), "{refused}");
        assert!(refused.to_string().contains("taken by node of alpha"), "{refused}");
    }
    assert_eq!(bindings.taken().unwrap(), std::slice::from_ref(&note));
    // The same one takes it again; undone, it stays so.
    let again = bindings.take(address, "node of alpha", false).unwrap();
    bindings.undo(again).unwrap();
    assert_eq!(bindings.taken().unwrap(), [note]);
    assert_eq!(text(&tree, "sys/bus/pci/drivers/vfio-pci/unbind"), "");
}

#[test]
fn virtual_functions_of_another_taker_that_runs_are_not_removed() {
    let (tree, bindings) = card_with_two("down\n");
    let [card, part] = ["04:00.0", "04:10.2"].map(|address| address.parse().unwrap());
    for address in [card, part] {
        let note = Binding {
            address,
            kind: "Ethernet card".to_owned(),
            former: None,
            virtual_functions: 0,
            taker: "node of alpha".to_owned(),
            process: TakerProcess::this(),
        };
        bindings.write_note(&note).unwrap();
        let refused = bindings.make_virtual(card, 4, "node of beta").unwrap_err();
        assert!(
            matches!(refused, VfioError::TakenBy { address: at, .. } if at == address),
            "{refused}"
        );
        assert_eq!(bindings.taken().unwrap(), [note]);
        bindings.forget(address).unwrap();
    }
    assert_eq!(text(&tree, "sys/devices/pci0000:00/0000:04:00.0/sriov_numvfs"), "2\n");
}

#[test]
fn unused_virtual_functions_are_there_again_when_another_number_of_them_cannot_be_taken() {
    let (tree, bindings) = card_with_two("down\n");
    let folder = "sys/devices/pci0000:00/0000:04:00.0";
    let card = "04:00.0".parse().unwrap();
    // A third one, whose driver does not release it: nor do those of the others.
    let path = tree.0.path().join("sys/devices/pci0000:00");
    tree.function("0000:04:10.4", "0x020000\n", 10, Some("igbvf"));
    std::os::unix::fs::symlink(path.join("0000:04:10.4"), path.join("0000:04:00.0/virtfn2"))
        .unwrap();
    let refused = bindings.make_virtual(card, 3, "alpha").unwrap_err();
    assert!(matches!(refused, VfioError::NotBound { .. }), "{refused}");
    assert_eq!(text(&tree, &format!("{folder}/sriov_drivers_autoprobe")), "1");
    assert_eq!(text(&tree, &format!("{folder}/sriov_numvfs")), "2");
    assert!(bindings.taken().unwrap().is_empty());
}
