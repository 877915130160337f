//! The hub's client and the cache, against a hub on this machine.
#![allow(missing_docs, reason = "tests")]

mod mock;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use infernum_hub::{Event, Hub, HubError, Repository, Settings};
use mock::{COMMIT, ID, Mock, Model, digest, etag};
use tempfile::TempDir;

/// Bytes that no two of are alike over a long way.
fn bytes(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn model() -> Model {
    let file = |name: &str, bytes: Vec<u8>| (name.to_owned(), bytes);
    Model {
        files: vec![
            file("config.json", b"{}".to_vec()),
            file("a.safetensors", bytes(3_000_000, 1)),
            file("b.safetensors", bytes(5000, 2)),
            file("sub/c.gguf", bytes(2000, 3)),
        ],
        ..Model::default()
    }
}

fn settings(mock: &Mock, cache: &Path) -> Settings {
    let none = |_: &str| None;
    Settings {
        endpoint: mock.endpoint.clone(),
        cache: Some(cache.to_owned()),
        pause: Duration::from_millis(1),
        patience: Duration::from_secs(5),
        ..Settings::of(&none).expect("settings")
    }
}

fn repository() -> Repository {
    ID.parse().expect("a name")
}

/// All files, fetched; gives their folder.
fn fetch(settings: &Settings) -> Result<PathBuf, HubError> {
    fetch_telling(settings, &mut |_| {})
}

fn fetch_telling(
    settings: &Settings,
    event: &mut dyn FnMut(Event<'_>),
) -> Result<PathBuf, HubError> {
    let (hub, repository) = (Hub::new(settings)?, repository());
    let snapshot = hub.snapshot(&repository)?;
    snapshot.fetch(snapshot.files(), event)?;
    snapshot.keep()?;
    Ok(snapshot.folder())
}

fn holds_all(folder: &Path, model: &Model) {
    for (name, bytes) in &model.files {
        assert!(fs::read(folder.join(name)).expect(name) == *bytes, "{name}");
    }
}

fn dir() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

#[test]
fn files_lie_where_other_tools_look_for_them() {
    let (mock, cache) = (Mock::start(model()), dir());
    let (mut total, mut sum) = (0, 0);
    let folder = fetch_telling(&settings(&mock, cache.path()), &mut |event| match event {
        Event::Begin(bytes) => total = bytes,
        Event::Bytes(bytes) => sum += bytes,
        Event::End | Event::Notice(_) => {}
    });
    let folder = folder.expect("files");
    holds_all(&folder, &mock.model);
    assert_eq!((total, sum), (3_007_002, 3_007_002));
    let root = cache.path().join("models--org--name");
    assert_eq!(folder, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).expect("a ref"), COMMIT);
    let (a, c) = (etag(&mock.model.files[1].1), etag(&mock.model.files[3].1));
    let link = |name: &str| fs::read_link(folder.join(name)).expect(name);
    assert_eq!(link("a.safetensors"), Path::new("../../blobs").join(&a));
    assert_eq!(link("sub/c.gguf"), Path::new("../../../blobs").join(c));
    assert!(cache.path().join(".locks/models--org--name").join(format!("{a}.lock")).is_file());
    assert!(!root.join("blobs").join(format!("{a}.incomplete")).exists());

    let before = mock.seen().len();
    fetch(&settings(&mock, cache.path())).expect("files");
    assert_eq!(mock.seen().len(), before + 1, "what is there is not asked for again");
}

#[test]
fn what_another_tool_downloaded_is_found() {
    let (mock, cache) = (Mock::start(model()), dir());
    let root = cache.path().join("models--org--name");
    for (name, bytes) in &mock.model.files {
        let (blob, link) =
            (root.join("blobs").join(etag(bytes)), root.join("snapshots").join(COMMIT).join(name));
        fs::create_dir_all(blob.parent().expect("blobs")).expect("made");
        fs::create_dir_all(link.parent().expect("a folder")).expect("made");
        fs::write(&blob, bytes).expect("written");
        std::os::unix::fs::symlink(&blob, &link).expect("a link");
    }
    fs::create_dir_all(root.join("refs")).expect("made");
    fs::write(root.join("refs/main"), COMMIT).expect("written");
    holds_all(&fetch(&settings(&mock, cache.path())).expect("files"), &mock.model);
    assert!(mock.seen().iter().all(|seen| seen.path.starts_with("/api/")), "{:?}", mock.seen());
    // And with nobody to ask.
    let offline = Settings { offline: true, ..settings(&mock, cache.path()) };
    let before = mock.seen().len();
    holds_all(&fetch(&offline).expect("files"), &mock.model);
    assert_eq!(mock.seen().len(), before);
}

#[test]
fn a_cut_download_goes_on_where_it_was_cut() {
    let cut = Model { cuts: AtomicUsize::new(3), cut_after: 700_000, ..model() };
    let (mock, cache) = (Mock::start(cut), dir());
    let mut sum = 0;
    let folder = fetch_telling(&settings(&mock, cache.path()), &mut |event| {
        if let Event::Bytes(bytes) = event {
            sum += bytes;
        }
    });
    holds_all(&folder.expect("files"), &mock.model);
    assert_eq!(sum, 3_007_002, "no byte comes twice");
    let ranges: Vec<_> =
        mock.seen().iter().filter(|s| s.elsewhere).filter_map(|s| s.range.clone()).collect();
    assert_eq!(ranges, ["bytes=700000-", "bytes=1400000-", "bytes=2100000-"]);
}

#[test]
fn a_download_that_died_is_gone_on_with_by_the_next_process() {
    let dies = Model { cuts: AtomicUsize::new(2), cut_after: 700_000, ..model() };
    let (mock, cache) = (Mock::start(dies), dir());
    let error =
        fetch(&Settings { tries: 2, ..settings(&mock, cache.path()) }).expect_err("it dies");
    assert!(
        matches!(error, HubError::Cut { found: 1_400_000, expected: 3_000_000, .. }),
        "{error}"
    );
    let blob = cache.path().join("models--org--name/blobs").join(etag(&mock.model.files[1].1));
    assert!(!blob.exists());
    let mut begun = 0;
    let folder = fetch_telling(&settings(&mock, cache.path()), &mut |event| {
        if let Event::Begin(bytes) = event {
            begun = bytes;
        }
    });
    holds_all(&folder.expect("files"), &mock.model);
    assert!(begun <= 1_600_000 + 7002, "{begun}");
    assert!(mock.seen().iter().any(|s| s.range.as_deref() == Some("bytes=1400000-")));
}

#[test]
fn a_hub_without_ranges_is_read_from_the_start() {
    let rangeless =
        Model { cuts: AtomicUsize::new(1), cut_after: 700_000, ignores_ranges: true, ..model() };
    let (mock, cache) = (Mock::start(rangeless), dir());
    holds_all(&fetch(&settings(&mock, cache.path())).expect("files"), &mock.model);
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let (mock, cache) = (Mock::start(Model { token: "hf_secret", ..model() }), dir());
    let error = fetch(&settings(&mock, cache.path())).expect_err("no token").to_string();
    assert!(
        error.contains("has no model `org/name`, or it is private") && error.contains("HF_TOKEN"),
        "{error}"
    );
    let with =
        |token: &str| Settings { token: Some(token.to_owned()), ..settings(&mock, cache.path()) };
    let error = fetch(&with("hf_wrong")).expect_err("another token").to_string();
    assert!(error.contains("refuses the token") && !error.contains("hf_wrong"), "{error}");
    holds_all(&fetch(&with("hf_secret")).expect("files"), &mock.model);
    let seen = mock.seen();
    assert!(seen.iter().any(|s| s.elsewhere));
    assert!(seen.iter().filter(|s| s.elsewhere).all(|s| s.token.is_none()), "{seen:?}");
    assert!(seen.iter().any(|s| s.path.starts_with("/direct/") && s.token.is_some()));
    assert!(matches!(fetch(&with("a\nb")), Err(HubError::Token)));
}

#[test]
fn refusals_say_what_to_do() {
    for (status, code, expected) in [
        (403, "GatedRepo", "ask for access at http://"),
        (404, "RepoNotFound", "has no model `org/name`"),
        (404, "RevisionNotFound", "has no revision `main`"),
        (410, "", "answered 410"),
    ] {
        let (mock, cache) =
            (Mock::start(Model { refusal: Some((status, code)), ..model() }), dir());
        let message = fetch(&settings(&mock, cache.path())).expect_err(code).to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn wrong_contents_are_not_kept() {
    let (mock, cache) = (Mock::start(Model { lies: AtomicUsize::new(1), ..model() }), dir());
    holds_all(&fetch(&settings(&mock, cache.path())).expect("at the second time"), &mock.model);
    let (mock, cache) = (Mock::start(Model { lies: AtomicUsize::new(99), ..model() }), dir());
    let error = fetch(&settings(&mock, cache.path())).expect_err("it lies");
    assert!(matches!(error, HubError::Checksum { .. }), "{error}");
    for name in fs::read_dir(cache.path().join("models--org--name/blobs")).expect("blobs") {
        let path = name.expect("a name").path();
        let name = path.file_name().and_then(|n| n.to_str()).expect("UTF-8");
        let whole = fs::read(&path).expect("bytes");
        assert!(name.ends_with(".incomplete") || digest(&whole).starts_with(name), "{name}");
    }
    let (mock, cache) = (Mock::start(Model { longer: true, ..model() }), dir());
    let error = fetch(&settings(&mock, cache.path())).expect_err("it sends more");
    assert!(matches!(error, HubError::Longer { .. }), "{error}");
}

#[test]
fn names_cannot_leave_the_cache() {
    let also =
        ["../../../evil", "/evil", "a/../../evil", "a\\..\\evil", "C:evil", ""].map(str::to_owned);
    let (mock, cache) = (Mock::start(Model { also: also.to_vec(), ..model() }), dir());
    let (hub, repository) =
        (Hub::new(&settings(&mock, cache.path())).expect("a hub"), repository());
    let snapshot = hub.snapshot(&repository).expect("a snapshot");
    assert_eq!(snapshot.files().len(), 4, "{:?}", snapshot.files());
    for name in also {
        let error = snapshot.fetch(&[name], &mut |_| {}).expect_err("refused");
        assert!(matches!(error, HubError::Name { .. }), "{error}");
    }
}

#[test]
fn without_a_hub_the_cache_is_asked_and_what_it_lacks_is_named() {
    let (mock, cache) = (Mock::start(model()), dir());
    let offline = || Settings { offline: true, ..settings(&mock, cache.path()) };
    let error = fetch(&offline()).expect_err("an empty cache").to_string();
    assert!(
        error.contains("HF_HUB_OFFLINE is set") && error.contains("`org/name` at revision `main`"),
        "{error}"
    );
    let folder = fetch(&settings(&mock, cache.path())).expect("files");
    // Nobody listens there any more.
    let gone =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port");
    let gone = || Settings { endpoint: format!("http://{gone}"), ..settings(&mock, cache.path()) };
    assert_eq!(fetch(&gone()).expect("from the cache"), folder);
    fs::remove_file(folder.join("b.safetensors")).expect("removed");
    let (hub, repository) = (Hub::new(&gone()).expect("a hub"), repository());
    let snapshot = hub.snapshot(&repository).expect("a snapshot");
    assert!(snapshot.cut_off().is_some_and(|why| why.to_string().contains("cannot be reached")));
    let wanted = ["a.safetensors".to_owned(), "b.safetensors".to_owned()];
    let message = snapshot.fetch(&wanted, &mut |_| {}).expect_err("one is missing").to_string();
    assert!(message.contains("these files of `org/name`: b.safetensors;"), "{message}");
}

#[test]
fn downloads_at_once_do_not_clash() {
    let slow = Model { cuts: AtomicUsize::new(4), cut_after: 400_000, ..model() };
    let (mock, cache) = (Mock::start(slow), dir());
    std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..4).map(|_| scope.spawn(|| fetch(&settings(&mock, cache.path())))).collect();
        all.into_iter()
            .for_each(|t| holds_all(&t.join().expect("no panic").expect("files"), &mock.model));
    });
    let whole = |s: &mock::Seen| {
        s.method == "GET" && s.elsewhere && s.path.ends_with("/a.safetensors") && s.range.is_none()
    };
    assert_eq!(mock.seen().iter().filter(|s| whole(s)).count(), 1, "it is downloaded once");
    assert_eq!(mock.model.cuts.load(Ordering::SeqCst), 0);
}

#[test]
fn what_the_disk_cannot_hold_is_not_begun() {
    let (mock, cache) = (Mock::start(Model { size: Some(1 << 60), ..model() }), dir());
    let error = fetch(&settings(&mock, cache.path())).expect_err("no disk has that");
    assert!(matches!(error, HubError::NoSpace { .. }), "{error}");
    assert!(mock.seen().iter().all(|seen| seen.method == "HEAD" || seen.path.starts_with("/api/")));
}
