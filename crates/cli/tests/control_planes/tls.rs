//! etcd that speaks TLS alone, with certificates that are made as the book says.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::processes::{Cluster, Part, etcd};
use super::support::machines::free_port;
use super::support::{PATIENCE, open};
use super::{RACK, logs};

/// Makes the certificates of the book's recipe in a new folder, for members on this machine.
pub fn make_certificates(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src");
    let book = std::fs::read_to_string(book.join("high-availability.md")).unwrap();
    let recipe = book.split("```\n").find(|block| block.starts_with("openssl req -x509"));
    let recipe = recipe.expect("the book has the recipe").to_owned();
    let names = "DNS:c1,DNS:c2,DNS:c3";
    assert!(recipe.contains(names), "{recipe}");
    let recipe = recipe.replace(names, "DNS:localhost");
    let made = Command::new("sh").args(["-ec", &recipe]).current_dir(folder).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// The options by which `rackbus` knows etcd by the authority of one folder, and shows it the certificate of another.
pub fn options(authority: &Path, shown: Option<&Path>) -> Vec<String> {
    let named = |option: &str, folder: &Path, file: &str| {
        [option.to_owned(), folder.join(file).display().to_string()]
    };
    let shown = shown.into_iter().flat_map(|folder| {
        let certificate = named("--etcd-cert", folder, "control.pem");
        certificate.into_iter().chain(named("--etcd-key", folder, "control.key"))
    });
    named("--etcd-ca", authority, "ca.pem").into_iter().chain(shown).collect()
}

/// A drive is borrowed, used and returned.
async fn lend_once(cluster: &Cluster) {
    let beta = cluster.nodes[1].client();
    let lease = beta.borrow("alpha/nvme0", "beta").await.unwrap();
    let used = lease.clone();
    let using = tokio::task::spawn_blocking(move || {
        let (mut drive, mut block) = (open(&used), vec![0; 4096]);
        drive.write(0, &[7; 4096], false).unwrap();
        drive.read(0, &mut block).unwrap();
        assert!(block.iter().all(|byte| *byte == 7));
    });
    using.await.unwrap();
    beta.give_back(lease.lease).await.unwrap();
}

/// A backup from etcd, with these options; what it said, where it is refused.
fn back_up(cluster: &Cluster, options: &[String]) -> Result<String, String> {
    let (from, file) = (format!("etcd:{}", cluster.store), cluster.root.path().join("backup"));
    let own = ["--rack", "lab", "control", "backup", file.to_str().unwrap(), "--from", &from];
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    cluster.controls[0].run(&[&own, &options[..]].concat())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_known_by_its_authority_and_takes_those_whom_it_has_certified() {
    let Some(program) = etcd() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [own, foreign] = ["own", "foreign"].map(|name| folder.path().join(name));
    make_certificates(&own);
    make_certificates(&foreign);
    let text = RACK.replace("[hosts.gamma]\n", "");
    let mut cluster = Cluster::store(&program, 3, &text, Some(&own));
    let store = cluster.store.clone();
    let told = |options: &[String]| [&["--etcd".to_owned(), store.clone()], options].concat();
    let (good, wrong) = (told(&options(&own, Some(&own))), told(&options(&foreign, Some(&own))));
    for _ in 0..2 {
        cluster.control(&good.iter().map(String::as_str).collect::<Vec<_>>());
    }
    cluster.leader(None).await;
    for host in ["alpha", "beta"] {
        cluster.node(host).await;
    }
    cluster.up().await;
    lend_once(&cluster).await;

    // No time in which etcd may begin to answer makes its certificate another one: it is not waited for, once all listen.
    let begun = Instant::now();
    for member in store.split(',').filter_map(|url| url.strip_prefix("https://")) {
        while std::net::TcpStream::connect(member).is_err() {
            assert!(begun.elapsed() < PATIENCE, "{member} does not listen: {}", logs(&cluster));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let file = cluster.root.path().join("rack.toml");
    let listen = format!("127.0.0.1:{}", free_port());
    let begun = ["control", file.to_str().unwrap(), "--listen", &listen, "--store", "etcd"];
    let wrong: Vec<&str> = begun.into_iter().chain(wrong.iter().map(String::as_str)).collect();
    let mut misled = Part::rackbus(cluster.root.path(), "misled", &wrong);

    let unknown = "its certificate is not of the authority that --etcd-ca names";
    let refused = back_up(&cluster, &options(&foreign, Some(&own))).unwrap_err();
    assert!(
        refused.contains("not the one that is meant") && refused.contains(unknown),
        "{refused}"
    );
    let refused = back_up(&cluster, &options(&own, None)).unwrap_err();
    assert!(
        refused.contains("etcd does not answer") && refused.contains("Certificate"),
        "{refused}"
    );
    let refused = back_up(&cluster, &options(&own, Some(&foreign))).unwrap_err();
    assert!(refused.contains("etcd does not answer") && refused.contains("alert"), "{refused}");
    back_up(&cluster, &options(&own, Some(&own))).unwrap();

    assert!(!misled.ended().success(), "{}", logs(&cluster));
    let said = misled.log();
    assert!(said.contains(unknown) && said.contains("see that etcd runs"), "{said}");
    assert!(!said.contains("waiting for etcd"), "{said}");
}
