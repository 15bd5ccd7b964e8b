use std::os::unix::fs::symlink;

use super::*;

/// A tree as the kernel has it, below a temporary folder.
pub(crate) struct Tree(pub(crate) tempfile::TempDir);

impl Tree {
    pub(crate) fn new() -> Tree {
        let tree = Tree(tempfile::tempdir().unwrap());
        for folder in ["sys/bus/pci/devices", "sys/bus/pci/drivers", "sys/block", "proc/self"] {
            fs::create_dir_all(tree.0.path().join(folder)).unwrap();
        }
        tree
    }

    pub(crate) fn sysfs(&self) -> Sysfs {
        Sysfs::below(self.0.path())
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A function of this class in this group, with a driver or none.
    pub(crate) fn function(&self, name: &str, class: &str, group: u32, driver: Option<&str>) {
        let folder = format!("sys/devices/pci0000:00/{name}");
        for (file, text) in [("vendor", "0x1b36\n"), ("device", "0x0010\n"), ("class", class)] {
            self.write(&format!("{folder}/{file}"), text);
        }
        let path = self.0.path().join(&folder);
        let members = self.0.path().join(format!("sys/kernel/iommu_groups/{group}/devices"));
        fs::create_dir_all(&members).unwrap();
        symlink(&path, members.join(name)).unwrap();
        symlink(&path, self.0.path().join("sys/bus/pci/devices").join(name)).unwrap();
        symlink(members.parent().unwrap(), path.join("iommu_group")).unwrap();
        if let Some(driver) = driver {
            let driver = self.0.path().join("sys/bus/pci/drivers").join(driver);
            fs::create_dir_all(&driver).unwrap();
            symlink(driver, path.join("driver")).unwrap();
        }
    }
}

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

#[test]
fn addresses_are_read_in_both_forms_and_shown_in_the_long_one() {
    for (text, shown) in [
        ("03:00.0", "0000:03:00.0"),
        ("10000:e1:1f.7", "10000:e1:1f.7"),
        ("0:3:0.1", "0000:03:00.1"),
    ] {
        assert_eq!(address(text).to_string(), shown);
    }
    for wrong in
        ["", "03:00", "03:00.8", "03:20.0", "100:00.0", "x:0.0", "1:2:3:4.0", "03:00.+1", "../0.0"]
    {
        assert!(wrong.parse::<PciAddress>().is_err(), "{wrong}");
    }
}

#[test]
fn a_function_is_described_as_sysfs_has_it() {
    let tree = Tree::new();
    tree.function("0000:03:00.0", "0x010802\n", 7, Some("nvme"));
    let folder = "sys/devices/pci0000:00/0000:03:00.0";
    tree.write(
        &format!("{folder}/resource"),
        "0x00000000fe800000 0x00000000fe803fff 0x0000000000140204\n\
         0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
         0x000000000000c000 0x000000000000c01f 0x0000000000040101\n",
    );
    tree.write(&format!("{folder}/sriov_totalvfs"), "8\n");
    tree.write(&format!("{folder}/sriov_numvfs"), "1\n");
    tree.write(&format!("{folder}/reset_method"), "flr bus\n");
    tree.function("0000:03:10.0", "0x010802\n", 8, Some("vfio-pci"));
    let path = tree.0.path().join("sys/devices/pci0000:00");
    symlink(path.join("0000:03:10.0"), path.join("0000:03:00.0/virtfn0")).unwrap();
    symlink(path.join("0000:03:00.0"), path.join("0000:03:10.0/physfn")).unwrap();

    let facts = tree.sysfs().facts(address("03:00.0")).unwrap();
    assert_eq!((facts.vendor, facts.device, facts.class), (0x1b36, 0x0010, 0x01_0802));
    assert_eq!(
        (facts.kind(), facts.driver.as_deref(), facts.group),
        ("NVMe drive", Some("nvme"), Some(7))
    );
    let bar = |bar, size, io, wide| BarFacts { bar, size, io, wide, prefetchable: false };
    assert_eq!(facts.bars, [bar(0, 0x4000, false, true), bar(2, 0x20, true, false)]);
    assert_eq!((facts.virtual_total, facts.virtual_functions), (8, vec![address("03:10.0")]));
    assert_eq!(facts.reset_methods, ["flr", "bus"]);
    let virtual_function = tree.sysfs().facts(address("03:10.0")).unwrap();
    assert_eq!(virtual_function.physical, Some(address("03:00.0")));
    assert_eq!(tree.sysfs().all().unwrap(), [address("03:00.0"), address("03:10.0")]);
    let none = tree.sysfs().facts(address("04:00.0")).unwrap_err();
    assert!(matches!(none, VfioError::NotFound(_)));
}

#[test]
fn a_function_is_refused_whose_group_has_something_in_use_and_all_of_it_is_named() {
    let tree = Tree::new();
    tree.function("0000:00:1c.0", "0x060400\n", 3, Some("pcieport"));
    tree.function("0000:02:00.0", "0x010802\n", 3, Some("nvme"));
    tree.function("0000:02:00.1", "0x020000\n", 3, Some("vfio-pci"));
    assert!(tree.sysfs().check(address("02:00.0")).is_ok());
    tree.function("0000:02:00.2", "0x0c0330\n", 3, Some("xhci_hcd"));
    let refused = tree.sysfs().check(address("02:00.0")).unwrap_err().to_string();
    assert!(refused.contains("IOMMU group 3"), "{refused}");
    assert!(refused.contains("0000:02:00.2 (driven by xhci_hcd)"), "{refused}");
    assert!(!refused.contains("pcieport"), "{refused}");
    let bridge = tree.sysfs().check(address("00:1c.0")).unwrap_err();
    assert!(matches!(bridge, VfioError::Bridge(_)));
    fs::remove_file(tree.sysfs().function(address("02:00.1")).join("iommu_group")).unwrap();
    let unbounded = tree.sysfs().check(address("02:00.1")).unwrap_err();
    assert!(matches!(unbounded, VfioError::NoIommu(_)));
}

#[test]
fn a_drive_with_a_mounted_partition_and_a_card_that_is_up_are_in_use() {
    let tree = Tree::new();
    tree.function("0000:03:00.0", "0x010802\n", 7, Some("nvme"));
    tree.function("0000:04:00.0", "0x020000\n", 8, Some("igb"));
    let drive = "sys/devices/pci0000:00/0000:03:00.0/nvme/nvme0/nvme0n1";
    tree.write(&format!("{drive}/dev"), "259:0\n");
    tree.write(&format!("{drive}/nvme0n1p1/dev"), "259:1\n");
    symlink(tree.0.path().join(drive), tree.0.path().join("sys/block/nvme0n1")).unwrap();
    tree.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
    let sysfs = tree.sysfs();
    sysfs.check_unused(address("03:00.0")).unwrap();
    tree.write("proc/self/mountinfo", "22 1 259:1 / /srv rw - ext4 /dev/nvme0n1p1 rw\n");
    let used = sysfs.check_unused(address("03:00.0")).unwrap_err().to_string();
    assert!(used.contains("nvme0n1p1 is mounted at /srv"), "{used}");
    tree.write("proc/self/mountinfo", "");
    tree.write("proc/swaps", "Filename Type\n/dev/nvme0n1 partition 1 0 -2\n");
    let used = sysfs.check_unused(address("03:00.0")).unwrap_err().to_string();
    assert!(used.contains("nvme0n1 is swap space"), "{used}");
    tree.write("sys/devices/pci0000:00/0000:04:00.0/net/eth1/operstate", "down\n");
    sysfs.check_unused(address("04:00.0")).unwrap();
    tree.write("sys/devices/pci0000:00/0000:04:00.0/net/eth1/operstate", "up\n");
    let used = sysfs.check_unused(address("04:00.0")).unwrap_err().to_string();
    assert!(used.contains("its network interface eth1 is up"), "{used}");
}

#[test]
fn a_drive_is_in_use_whose_file_system_has_a_number_of_its_own() {
    let tree = Tree::new();
    tree.function("0000:03:00.0", "0x010802\n", 7, Some("nvme"));
    let drive = "sys/devices/pci0000:00/0000:03:00.0/nvme/nvme0/nvme0n1";
    tree.write(&format!("{drive}/dev"), "259:0\n");
    tree.write(&format!("{drive}/nvme0n1p1/dev"), "259:1\n");
    symlink(tree.0.path().join(drive), tree.0.path().join("sys/block/nvme0n1")).unwrap();
    // As btrfs has it; the optional field before the hyphen is there or not.
    let line = |source| format!("30 1 0:26 /@ /home rw shared:5 - btrfs {source} rw,subvol=/@\n");
    tree.write("proc/self/mountinfo", &line("/dev/nvme1n1p1"));
    tree.sysfs().check_unused(address("03:00.0")).unwrap();
    tree.write("proc/self/mountinfo", &line("/dev/nvme0n1p1"));
    let used = tree.sysfs().check_unused(address("03:00.0")).unwrap_err().to_string();
    assert!(used.contains("nvme0n1p1 is mounted at /home"), "{used}");
    // By one of its other names.
    tree.write("dev/nvme0n1p1", "");
    fs::create_dir_all(tree.0.path().join("dev/disk/by-label")).unwrap();
    symlink("../../nvme0n1p1", tree.0.path().join("dev/disk/by-label/home")).unwrap();
    tree.write("proc/self/mountinfo", &line("/dev/disk/by-label/home"));
    let used = tree.sysfs().check_unused(address("03:00.0")).unwrap_err().to_string();
    assert!(used.contains("nvme0n1p1 is mounted at /home"), "{used}");
}

#[test]
fn a_drive_is_in_use_by_the_disk_that_stands_for_all_ways_to_it() {
    let tree = Tree::new();
    tree.function("0000:03:00.0", "0x010802\n", 7, Some("nvme"));
    tree.function("0000:04:00.0", "0x010802\n", 8, Some("nvme"));
    for (function, number) in [("0000:03:00.0", 0), ("0000:04:00.0", 1)] {
        let controller = format!("sys/devices/pci0000:00/{function}/nvme/nvme{number}");
        tree.write(&format!("{controller}/state"), "live\n");
        let subsystem = format!("sys/devices/virtual/nvme-subsystem/nvme-subsys{number}");
        let head = format!("{subsystem}/nvme{number}n1");
        tree.write(&format!("{head}/dev"), &format!("259:{number}\n"));
        let path = |name: &str| tree.0.path().join(name);
        symlink(path(&controller), path(&subsystem).join(format!("nvme{number}"))).unwrap();
        fs::create_dir_all(path("sys/class/nvme-subsystem")).unwrap();
        let class = format!("sys/class/nvme-subsystem/nvme-subsys{number}");
        symlink(path(&subsystem), path(&class)).unwrap();
        symlink(path(&head), path(&format!("sys/block/nvme{number}n1"))).unwrap();
    }
    tree.write("proc/self/mountinfo", "22 1 259:1 / /srv rw - ext4 /dev/nvme1n1 rw\n");
    tree.sysfs().check_unused(address("03:00.0")).unwrap();
    let used = tree.sysfs().check_unused(address("04:00.0")).unwrap_err().to_string();
    assert!(used.contains("nvme1n1 is mounted at /srv"), "{used}");
}
