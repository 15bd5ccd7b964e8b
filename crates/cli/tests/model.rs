//! `rackbus model`: what it answers, what it refuses and where, and the running rack.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use support::{Rack, THREE_HOSTS};

fn example(name: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/model").join(name);
    file.display().to_string()
}

fn rackbus(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rackbus")).arg("model").args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = rackbus(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A folder with a rack and a workload, changed.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new(rack: impl Fn(String) -> String, workload: impl Fn(String) -> String) -> Files {
        let folder = tempfile::tempdir().unwrap();
        let read = |name| std::fs::read_to_string(example(name)).unwrap();
        std::fs::write(folder.path().join("rack.toml"), rack(read("rack.toml"))).unwrap();
        std::fs::write(folder.path().join("workload.toml"), workload(read("workload.toml")))
            .unwrap();
        Files { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, more: &[&str]) -> Output {
        let files =
            ["rack.toml", "workload.toml"].map(|name| self.path(name).display().to_string());
        rackbus(&[&["run", &files[0], &files[1]], more].concat())
    }

    /// What is said of a wrong file, without the folder's name.
    fn refused(&self) -> String {
        let output = self.run(&[]);
        assert_eq!(output.status.code(), Some(2));
        let folder = format!("{}/", self.folder.path().display());
        String::from_utf8(output.stderr).unwrap().replace(&folder, "")
    }
}

#[test]
fn a_workload_is_answered_with_flows_tenants_and_links() {
    let answer = json(&["run", &example("rack.toml"), &example("workload.toml")]);
    let flows = answer["flows"].as_array().unwrap();
    let names: Vec<&str> = flows.iter().map(|flow| flow["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["database", "training", "results"]);
    assert_eq!(flows[1]["bottleneck"], "lender/root: split reads");
    assert_eq!(flows[2]["bottleneck"], "demand");
    let rate = flows[2]["bytes_per_second"].as_f64().unwrap();
    assert!((rate / 2e9 - 1.0).abs() < 0.03, "{rate}");
    assert_eq!(answer["tenants"].as_array().unwrap().len(), 2);
    assert!(answer["links"].as_array().unwrap().iter().any(|l| l["there"].as_f64() > Some(0.15)));
    // The same again: simulations are deterministic.
    assert_eq!(answer, json(&["run", &example("rack.toml"), &example("workload.toml")]));
}

#[test]
fn sweeps_answer_what_if() {
    let (rack, workload) = (example("rack.toml"), example("workload.toml"));
    let sweeps =
        ["--sweep", "hosts.lender.iommu=true,false", "--sweep", "flows.training.depth=1,2"];
    let answer = json(&[&["run", &rack, &workload][..], &sweeps].concat());
    let answers = answer.as_array().unwrap();
    assert_eq!(answers.len(), 4);
    let training = |nth: usize| answers[nth]["flows"][1]["bytes_per_second"].as_f64().unwrap();
    assert!(training(2) > 4.0 * training(0), "the IOMMU off frees the GPU's reads");
    assert_eq!(answers[3]["variant"][1], serde_json::json!(["flows.training.depth", "2"]));
}

#[test]
fn what_breaks_is_answered_for() {
    let (rack, workload) = (example("rack.toml"), example("workload.toml"));
    let rate = |answer: &Value, name: &str| {
        let flows = answer["flows"].as_array().unwrap().iter();
        let found =
            flows.filter(|flow| flow["name"] == name).map(|flow| flow["bytes_per_second"].as_f64());
        found.flatten().next()
    };
    let whole = json(&["run", &rack, &workload]);
    let without = json(&["run", &rack, &workload, "--without", "lender/gpu0"]);
    assert_eq!(rate(&without, "training"), None);
    assert!(rate(&without, "database") > rate(&whole, "database"));
    // Who loses the way is left out, and told.
    let local = Files::new(
        |rack| rack,
        |flows| {
            flows
                + "\n[flows.own]\nkind = \"nvme-read\"\nhost = \"lender\"\ndevice = \"lender/nvme0\"\n"
        },
    );
    let output = local.run(&["--without", "top-of-rack", "--json"]);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(rate(&answer, "own").is_some() && rate(&answer, "database").is_none());
    let told = "left out, as they need what is gone: database, training, results";
    assert_eq!(answer["notes"][0], told);
    // What was behind a switch is not joined to its host by the switch's being gone.
    let others = Files::new(
        |rack| rack,
        |flows| flows + "\n[flows.own]\nkind = \"write\"\nfrom = \"alpha\"\nto = \"beta\"\n",
    );
    let output = others.run(&["--without", "board", "--json"]);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(rate(&answer, "own").is_some() && rate(&answer, "database").is_none());
    let off = ["--sweep", "hosts.lender.iommu=false", "--degrade", "beta-ntb,top-of-rack"];
    let half = json(&[&["run", &rack, &workload][..], &off].concat());
    let level = json(&["run", &rack, &workload, "--without", "beta", "--flow-level"]);
    assert_eq!(level["notes"][0], "left out, as they need what is gone: training, results");
    // What is left out is told of variants too.
    let without = ["--without", "beta", "--sweep", "flows.database.depth=1,2"];
    let output = rackbus(&[&["run", &rack, &workload][..], &without].concat());
    let told = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        told.matches("left out, as they need what is gone: training, results").count(),
        1,
        "{told}"
    );
    assert!(rate(&half[0], "training") < Some(8.0e9));
    let refused = rackbus(&["run", &rack, &workload, "--degrade", "beta,alpha"]);
    assert_eq!(refused.status.code(), Some(2));
    // As the answer names it: a host's root complex.
    let root = json(&["run", &rack, &workload, "--degrade", "lender/root,board"]);
    let link = |answer: &Value| {
        let links = answer["links"].as_array().unwrap().iter();
        let mut own =
            links.filter(|link| link["ends"] == serde_json::json!(["lender/root", "board"]));
        own.next().map(|link| link["link"].as_str().unwrap().to_owned())
    };
    assert_eq!(
        [link(&whole), link(&root)],
        [Some("Gen4 x16".to_owned()), Some("Gen4 x8".to_owned())]
    );
    // Where nothing is left, that is the answer, with what it would have been about.
    let nothing = rackbus(&["run", &rack, &workload, "--without", "lender"]);
    let said = String::from_utf8(nothing.stderr).unwrap();
    assert!(said.contains("every flow needs what is gone: database, training, results"), "{said}");
}

#[test]
fn the_best_place_comes_first() {
    let (rack, workload) = (example("rack.toml"), example("workload.toml"));
    let place = |goal: &str| {
        let at = [
            "--at",
            "lender/gpu0=lender,board",
            "--sweep",
            "hosts.lender.iommu=false",
            "--goal",
            goal,
        ];
        json(&[&["place", &rack, &workload][..], &at].concat())
    };
    for (goal, key, rises) in [
        ("rate", "bytes_per_second", false),
        ("p99", "p99_ns", true),
        ("links", "busiest_link", true),
    ] {
        let placed = &place(goal)["arrangements"];
        let values: Vec<f64> =
            placed.as_array().unwrap().iter().map(|one| one[key].as_f64().unwrap()).collect();
        assert_eq!(values.len(), 2);
        assert_eq!(values[0] <= values[1], rises || values[0] == values[1], "{goal}: {values:?}");
        assert!(placed[0]["because"].as_str().unwrap().contains(": "));
    }
    // Of a flow that gets no job done nothing is known, which is not the least.
    let sizes = ["--sweep", "flows.training.size=1 GiB,1 MiB", "--goal", "p99"];
    let placed = json(&[&["place", &rack, &workload][..], &sizes].concat());
    assert_eq!((placed["possible"].as_u64(), placed["tried"].as_u64()), (Some(2), Some(2)));
    let hosts = placed["hosts"].as_array().unwrap();
    assert!(hosts.iter().all(|host| host["profile"].is_string()), "{placed}");
    let placed = &placed["arrangements"];
    assert_eq!(placed[0]["choice"][0][1], "1 MiB", "{placed}");
    assert!(placed[1]["p99_ns"].is_null(), "{placed}");
    let refused = rackbus(&["place", &rack, &workload, "--at", "lender/gpu9=lender,board"]);
    assert_eq!(refused.status.code(), Some(2));
    // A device that no link is written for has an ample one wherever it goes.
    let link =
        "[[fabric.links]]\nends = [\"board\", \"lender/gpu0\"]\ngeneration = 4\nlanes = 16\n";
    let bare = Files::new(|rack| rack.replace(link, ""), |workload| workload);
    let files = ["rack.toml", "workload.toml"].map(|name| bare.path(name).display().to_string());
    let placed = json(&["place", &files[0], &files[1], "--at", "lender/gpu0=lender,board"]);
    assert_eq!(placed["arrangements"].as_array().unwrap().len(), 2);
}

/// Places were those of a text that nobody wrote once: the file as it was written anew with other values.
#[test]
fn what_a_changed_value_makes_wrong_has_no_place_in_the_file() {
    let (rack, workload) = (example("rack.toml"), example("workload.toml"));
    let said = |arguments: &[&str]| {
        let output = rackbus(arguments);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let sweep = ["--sweep", "hosts.lender.profile=genoa,laptop"];
    let profile = said(&[&["run", &rack, &workload][..], &sweep].concat());
    let expected = "rack.toml with hosts.lender.profile = laptop: there is no profile `laptop`; a profile is one of";
    assert!(profile.contains(expected), "{profile}");
    let sweep = ["--sweep", "flows.database.host=alpha,delta"];
    let host = said(&[&["place", &rack, &workload][..], &sweep].concat());
    let expected =
        "workload.toml with flows.database.host = delta: the rack has no `delta`; an end is";
    assert!(host.contains(expected), "{host}");
    let at = said(&["place", &rack, &workload, "--at", "lender/gpu0=lender,nowhere"]);
    let expected = "rack.toml with lender/gpu0 at nowhere: there is no `nowhere`; an end is one of";
    assert!(at.contains(expected), "{at}");
    // What is wrong before anything is changed has its place, whatever is asked for.
    let wrong = Files::new(|rack| rack.replacen("lanes = 16", "lanes = 3", 1), |workload| workload);
    let files = ["rack.toml", "workload.toml"].map(|name| wrong.path(name).display().to_string());
    for more in [
        ["run", "--sweep", "hosts.lender.iommu=true,false"],
        ["run", "--degrade", "beta-ntb,top-of-rack"],
        ["run", "--without", "lender/gpu0"],
        ["place", "--at", "lender/gpu0=lender,board"],
    ] {
        let said =
            said(&[&more[..1], &[files[0].as_str(), files[1].as_str()], &more[1..]].concat());
        assert!(said.contains("rack.toml:32:9: `lanes` is 3; `lanes` is one of"), "{said}");
    }
}

/// A slot of another host is a place like others: the device is that host's then, by whatever names it.
#[test]
fn devices_move_to_other_hosts_and_to_any_place_that_there_is() {
    let (rack, workload) = (example("rack.toml"), example("workload.toml"));
    let moved =
        &json(&["place", &rack, &workload, "--at", "lender/gpu0=board,beta"])["arrangements"];
    assert_eq!(moved[0]["choice"], serde_json::json!([["lender/gpu0", "beta"]]));
    // Beside the memory that it reads, it waits for no link between hosts.
    assert!(
        moved[0]["bytes_per_second"].as_f64()
            > Some(4.0 * moved[1]["bytes_per_second"].as_f64().unwrap())
    );
    let any = &json(&["place", &rack, &workload, "--at", "lender/gpu0=any"])["arrangements"];
    let mut places: Vec<&str> =
        any.as_array().unwrap().iter().map(|one| one["choice"][0][1].as_str().unwrap()).collect();
    assert_eq!(places[0], "beta");
    places.sort_unstable();
    assert_eq!(places, ["alpha", "beta", "board", "lender"]);
    let hosts = json(&["place", &rack, &workload, "--sweep", "flows.database.host=any"]);
    assert_eq!(hosts["arrangements"].as_array().unwrap().len(), 3);
    // A host to which no way leads does not fit.
    let apart = Files::new(
        |rack| rack.replacen("[hosts.alpha]", "[hosts.gamma]\n[hosts.alpha]", 1),
        |workload| workload,
    );
    let files = ["rack.toml", "workload.toml"].map(|name| apart.path(name).display().to_string());
    let refused = rackbus(&["place", &files[0], &files[1], "--at", "lender/gpu9=any"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("no one link leads to `lender/gpu9`"), "{said}");
    let output = rackbus(&["place", &files[0], &files[1], "--at", "lender/gpu0=any"]);
    let said = String::from_utf8(output.stdout).unwrap();
    let why = "1 arrangement does not fit and is left out: ";
    assert!(
        said.contains(why) && said.contains("no way leads from `gamma/gpu0` to `beta`"),
        "{said}"
    );
}

/// A rack without a cable once had no place for a device: there was no link to lead elsewhere.
#[test]
fn devices_move_among_hosts_that_no_cable_joins() {
    let rack = "name = \"two\"\n[hosts.a]\n[hosts.a.devices.gpu0]\nkind = \"gpu\"\n[hosts.b]\n";
    let workload = "[flows.x]\nkind = \"read\"\nfrom = \"a/gpu0\"\nto = \"b\"\n";
    let files = Files::new(|_| rack.to_owned(), |_| workload.to_owned());
    let names = ["rack.toml", "workload.toml"].map(|name| files.path(name).display().to_string());
    let place = ["place", &names[0], &names[1], "--at", "a/gpu0=any"];
    let placed = &json(&place)["arrangements"];
    assert_eq!(placed.as_array().unwrap().len(), 2);
    assert_eq!(placed[0]["choice"][0][1], "b");
    // Of what an answer is, each answer tells.
    let told = String::from_utf8(rackbus(&place).stdout).unwrap();
    assert!(told.contains("hosts are taken to be: sapphire-rapids (a, b)"), "{told}");
}

/// Hosts of a rack have devices of the same names; once one of them had no place beside another.
#[test]
fn a_device_has_a_place_where_another_has_its_name() {
    let gpus = ["a", "b", "c"]
        .map(|host| format!("[hosts.{host}]\n[hosts.{host}.devices.gpu0]\nkind = \"gpu\"\n"));
    let rack = format!("name = \"three\"\n{}", gpus.concat());
    let workload = "duration = \"20 us\"\n[flows.x]\nkind = \"write\"\nfrom = \"b/gpu0\"\nto = \"c/gpu0\"\n\
                    [flows.y]\nkind = \"write\"\nfrom = \"a/gpu0\"\nto = \"a\"\n";
    let files = Files::new(|_| rack.clone(), |_| workload.to_owned());
    let names = ["rack.toml", "workload.toml"].map(|name| files.path(name).display().to_string());
    let place = ["place", &names[0], &names[1], "--at", "b/gpu0=any", "--at", "c/gpu0=a,b"];
    let placed = &json(&place)["arrangements"];
    assert_eq!(placed.as_array().unwrap().len(), 6);
    // Side by side, whatever they are called there.
    let best = &placed[0]["choice"];
    assert_eq!(best[0][1], best[1][1], "{placed}");
}

/// The search once began where no device fitted, and found nothing that did.
#[test]
fn a_search_begins_with_what_the_files_have() {
    let islands = ["a", "b", "c", "d"].map(|host| {
        format!("[hosts.{host}]\n[hosts.{host}.devices.gpu0]\nkind = \"gpu\"\n[[fabric.links]]\nends = [\"{host}\", \"{host}/gpu0\"]\n")
    });
    let rack = format!("name = \"four\"\n{}", islands.concat());
    let flow = |host: &str| {
        format!("[flows.{host}]\nkind = \"write\"\nfrom = \"{host}/gpu0\"\nto = \"{host}\"\n")
    };
    let workload = format!("duration = \"20 us\"\n{}", ["b", "c", "d"].map(flow).concat());
    let files = Files::new(|_| rack.clone(), |_| workload.clone());
    let names = ["rack.toml", "workload.toml"].map(|name| files.path(name).display().to_string());
    let seeds: Vec<String> = (1..70).map(|seed| seed.to_string()).collect();
    let (seeds, at) = (format!("seed={}", seeds.join(",")), ["b", "c", "d"]);
    let at = at.map(|host| format!("{host}/gpu0=any"));
    let mut place = vec!["place", &names[0], &names[1], "--sweep", &seeds];
    at.iter().for_each(|at| place.extend(["--at", at]));
    let placed = &json(&place)["arrangements"];
    assert_eq!(placed.as_array().unwrap().len(), 69);
    assert_eq!(placed[0]["choice"][0][1], "b", "{}", placed[0]);
}

/// Beyond what can be tried as a whole, one choice is improved after the other.
#[test]
fn a_large_choice_is_searched_key_by_key() {
    let rack = "name = \"one\"\n[hosts.a]\niommu = false\n[hosts.a.devices.gpu0]\nkind = \"gpu\"\n\
                [[fabric.links]]\nends = [\"a\", \"a/gpu0\"]\ngeneration = 3\nlanes = 1\n";
    let workload = "duration = \"20 us\"\n[flows.x]\nkind = \"write\"\nfrom = \"a/gpu0\"\nto = \"a\"\ndepth = 8\n";
    let files = Files::new(|_| rack.to_owned(), |_| workload.to_owned());
    let names = ["rack.toml", "workload.toml"].map(|name| files.path(name).display().to_string());
    let many = |key: &str, first: u32| {
        let values: Vec<String> = (first..first + 70).map(|value| value.to_string()).collect();
        format!("{key}={}", values.join(","))
    };
    let (depths, seeds) = (many("flows.x.depth", 1), many("seed", 1));
    let lanes = "fabric.links.0.lanes=1,4,16";
    let place =
        ["place", &names[0], &names[1], "--sweep", lanes, "--sweep", &depths, "--sweep", &seeds];
    let placed = &json(&place)["arrangements"];
    assert_eq!(placed[0]["choice"][0][1], "16");
    assert!(placed.as_array().unwrap().len() < 500);
    let told = String::from_utf8(rackbus(&place).stdout).unwrap();
    assert!(
        told.contains("of 14700 arrangements were tried, one choice after the other"),
        "{told}"
    );
}

#[test]
fn shares_are_near_what_is_simulated() {
    let (rack, workload) = (example("rack.toml"), example("workload.toml"));
    let shared = json(&["run", &rack, &workload, "--flow-level"]);
    let simulated = json(&["run", &rack, &workload]);
    let rate = |answer: &Value, key: &str| answer["flows"][2][key].as_f64().unwrap();
    let results = rate(&shared, "fair_bytes_per_second") / rate(&simulated, "bytes_per_second");
    assert!((0.95..=1.05).contains(&results), "{results}");
    // Who gets what where a root is full, shares cannot tell.
    assert!(shared["flows"][1]["bytes_per_second"].is_null());
    assert!(shared["flows"][1]["refused"].as_str().unwrap().contains("simulate it"));
    assert_eq!(shared["flows"][1]["bottleneck"], "lender/root: split reads");
}

#[test]
fn a_trace_beside_the_workload_is_played() {
    const FLOW: &str = "[flows.app]\nkind = \"trace\"\nhost = \"alpha\"\ndevice = \"lender/nvme0\"\n\
                        file = \"app.blkparse\"\n";
    let files = Files::new(|rack| rack, |_| FLOW.to_owned());
    let missing = files.refused();
    assert!(
        missing.contains("workload.toml:5:8: `app.blkparse` cannot be read: No such"),
        "{missing}"
    );
    let line = |nth: u64, rest: &str| format!("8,0 1 {nth} 0.{nth:06} 7 Q {rest} [app]\n");
    let trace = line(0, "R 0 + 8") + &line(50, "FN") + &line(100, "W 8 + 64") + "nonsense\n";
    std::fs::write(files.path("app.blkparse"), &trace).unwrap();
    let wrong = files.refused();
    assert!(wrong.contains("app.blkparse:4:1: `nonsense` is no line of blkparse"), "{wrong}");
    std::fs::write(files.path("app.blkparse"), trace.replace("nonsense\n", "")).unwrap();
    let output = files.run(&["--json"]);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["flows"][0]["jobs"], 2);
    assert_eq!(answer["notes"][0], "app: a flush, sync or discard of the trace is left out");
    let depth = files.run(&["--sweep", "flows.app.depth=1,2"]);
    assert!(depth.status.success(), "a variant's files are beside the workload too");
}

#[test]
fn pictures_are_drawn() {
    let files = Files::new(|rack| rack, |workload| workload.replace("2 ms", "100 us"));
    let folder = files.path("pictures");
    let output = files.run(&["--pictures", &folder.display().to_string()]);
    assert!(output.status.success());
    let timeline = files.path("timeline.svg").display().to_string();
    let sources = ["rack.toml", "workload.toml"].map(|name| files.path(name).display().to_string());
    let traced = rackbus(&["trace", &sources[0], &sources[1], "--picture", &timeline]);
    let traced = String::from_utf8(traced.stdout).unwrap();
    assert!(traced.contains("MRd 64 B") && traced.contains("in all"), "{traced}");
    for file in
        ["pictures/bandwidth.svg", "pictures/latency.svg", "pictures/links.svg", "timeline.svg"]
    {
        let text = std::fs::read_to_string(files.path(file)).unwrap();
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"), "{file}");
    }
}

#[test]
fn what_is_wrong_is_refused_with_its_place() {
    let same = |text: String| text;
    type Change = Box<dyn Fn(String) -> String>;
    let workload = |from: &'static str, to: &'static str| -> Change {
        Box::new(move |text: String| text.replacen(from, to, 1))
    };
    let cases: Vec<(Change, Change, &str)> = vec![
        (
            Box::new(same),
            workload("lender/nvme0", "lender/nvme9"),
            "workload.toml:8:10: the rack has no `lender/nvme9`",
        ),
        (Box::new(same), workload("\"4 KiB\"", "-4096"), "workload.toml:9:8: `size` is no size"),
        (
            Box::new(same),
            workload("to = \"beta\"", "to = \"beta@0x7000000000\""),
            "workload.toml:18:6: no way leads",
        ),
        (
            Box::new(same),
            workload(
                "from = \"lender/gpu0\"\nto = \"beta\"",
                "from = \"alpha\"\nto = \"alpha@0x7000000000\"",
            ),
            "workload.toml:18:6: `alpha` cannot reach alpha@0x7000000000",
        ),
        (
            workload(
                "[fabric.switches.board]",
                "[fabric.switches.other]\nhost = \"lender\"\n[[fabric.links]]\nends = [\"board\", \"other\"]\n[[fabric.links]]\nends = [\"other\", \"lender\"]\n[fabric.switches.board]",
            ),
            Box::new(same),
            "closes a loop",
        ),
        (
            workload(
                "[timing.switch]",
                "[timing.parts.board]\nlatancy = \"1 ns\"\n[timing.switch]",
            ),
            Box::new(same),
            "rack.toml:68:1: unknown key `latancy` in timing.parts.board; did you mean `latency`?",
        ),
        (
            workload(
                "[timing.switch]",
                "[timing.parts.\"lender/gpu0\"]\nmps = 512\n[timing.switch]",
            ),
            Box::new(same),
            "the MPS of lender/gpu0 is 512 B, the rack's is 256 B",
        ),
        (
            workload(
                "ends = [\"alpha-ntb\", \"top-of-rack\"]",
                "ends = [\"alpha-ntb\", \"beta-ntb\"]",
            ),
            Box::new(same),
            "workload.toml:8:10: no way leads from `alpha` to `lender/nvme0`",
        ),
    ];
    for (rack, workload, expected) in cases {
        let refused = Files::new(rack, workload).refused();
        assert!(refused.contains(expected), "{refused}\n{expected}");
        let told = refused.lines().filter(|line| line.starts_with("rackbus: "));
        assert_eq!(told.count(), 1, "{refused}");
    }
    let missing = rackbus(&["run", "/nowhere/rack.toml", "/nowhere/workload.toml"]);
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn the_running_rack_is_a_model_too() {
    let ram = "[hosts.alpha.devices.ram0]\nkind = \"memory\"\nsize = \"1 MiB\"\n";
    let rack = Rack::up(&format!("{THREE_HOSTS}{ram}"));
    let none = rack.bad(1, &["model", "run", "--live"]);
    assert!(none.contains("nothing is lent"), "{none}");
    rack.borrow("alpha/ram0", "beta");
    let none = rack.bad(1, &["model", "run", "--live"]);
    assert!(none.contains("no NVMe drive is lent in the running rack, but alpha/ram0"), "{none}");
    let lease = rack.borrow("alpha/nvme0", "beta");
    let answer = rack.good(&["model", "run", "--live", "--json"]);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let flow = &answer["flows"][0];
    assert_eq!(flow["name"], format!("lease-{}", lease.lease));
    assert_eq!(flow["ends"], serde_json::json!(["beta", "alpha/nvme0"]));
    assert!(flow["jobs"].as_u64() > Some(100));
    let notes = answer["notes"].to_string();
    assert!(notes.contains("left out as they are no NVMe drives: alpha/ram0"), "{notes}");
}
