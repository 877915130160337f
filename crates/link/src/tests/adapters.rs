//! Adapters of an engine, as several front ends load, see and unload them.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use infernum_runtime::AdapterBanks;

use super::*;

/// Reads folders below `root`: one that has a file `fault` cannot be read. Counts how often it is asked.
fn files(root: &Path) -> (AdapterFiles, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let read = move |folder: &Path| {
        counted.fetch_add(1, Ordering::AcqRel);
        let fault = std::fs::read_to_string(folder.join("fault"));
        fault.map_or_else(|_| Ok(AdapterBanks::default().random(0)), Err)
    };
    let root = root.canonicalize().expect("it is there");
    (AdapterFiles { root: Some(root), read: Box::new(read) }, count)
}

async fn front_end(host: &Arc<Host>) -> (UnixStream, Vec<String>) {
    let (mut stream, _) = connected(host);
    handshake::introduce(&mut stream, None, 1 << 20).await.expect("let in");
    let adapters = adapters(&mut stream).await;
    (stream, adapters)
}

/// The adapters of the next report that tells of them.
async fn adapters(stream: &mut UnixStream) -> Vec<String> {
    loop {
        if let Some(adapters) = heard(stream).await.adapters {
            return adapters;
        }
    }
}

/// What becomes of a command that is waited for.
async fn done(stream: &mut UnixStream, command: Command) -> Result<(), Refusal> {
    let key = command.key().expect("it is waited for");
    send(stream, &ToEngine::Command(command)).await;
    loop {
        if let Some((found, done)) = heard(stream).await.done.pop() {
            assert_eq!(found, key);
            return done;
        }
    }
}

fn load(key: u64, name: &str, path: &str) -> Command {
    Command::LoadAdapter(key, AdapterPath { name: name.to_owned(), path: path.to_owned() })
}

fn unload(key: u64, name: &str) -> Command {
    Command::UnloadAdapter(key, name.to_owned())
}

/// Asks for an adapter: why it is refused, if it is.
async fn asked(stream: &mut UnixStream, key: u64, adapter: &str) -> Option<Cause> {
    let ToEngine::Command(Command::Submit(mut submission)) = submit(key) else { panic!("it is") };
    submission.adapter = Some(adapter.to_owned());
    send(stream, &ToEngine::Command(Command::Submit(submission))).await;
    loop {
        let mut report = told(stream).await;
        if let Some((found, refusal)) = report.rejected.pop() {
            assert_eq!(found, key);
            return Some(refusal.cause);
        }
        if report.accepted.iter().any(|(found, _)| *found == key) {
            return None;
        }
    }
}

#[tokio::test]
async fn what_one_front_end_loads_all_have() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("a")).expect("made");
    let host = host_with(files(folder.path()).0);
    let (mut one, first) = front_end(&host).await;
    let (mut two, second) = front_end(&host).await;
    assert!(first.is_empty() && second.is_empty());
    assert_eq!(asked(&mut two, 1, "x").await, Some(Cause::NoAdapter));
    assert_eq!(done(&mut one, load(1, "x", "a")).await, Ok(()));
    assert_eq!(adapters(&mut two).await, ["x"]);
    assert_eq!(asked(&mut one, 2, "x").await, None);
    assert_eq!(asked(&mut two, 2, "x").await, None);
    assert_eq!(done(&mut two, load(3, "y", "a")).await, Ok(()));
    assert_eq!(adapters(&mut one).await, ["x", "y"]);
    let (mut late, known) = front_end(&host).await;
    assert_eq!(known, ["x", "y"]);
    let slot = done(&mut late, load(1, "z", "a")).await.expect_err("two is all");
    assert_eq!(slot.cause, Cause::NoAdapterSlot);
    assert_eq!(done(&mut two, unload(4, "x")).await, Ok(()));
    assert_eq!(adapters(&mut one).await, ["y"]);
    assert_eq!(adapters(&mut late).await, ["y"]);
    assert_eq!(asked(&mut one, 5, "x").await, Some(Cause::NoAdapter));
    let unknown = done(&mut one, unload(6, "x")).await.expect_err("it is gone");
    assert_eq!(unknown.cause, Cause::NoAdapter);
    assert_eq!(done(&mut late, load(2, "x", "a")).await, Ok(()), "its place is free");
    assert_eq!(adapters(&mut one).await, ["y", "x"]);
}

#[tokio::test]
async fn what_front_ends_may_not_load_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (root, outside) = (folder.path().join("root"), folder.path().join("outside"));
    for path in [root.join("a"), root.join("bad"), outside.clone()] {
        std::fs::create_dir_all(path).expect("made");
    }
    std::fs::write(root.join("bad/fault"), "no numbers").expect("written");
    std::os::unix::fs::symlink(&outside, root.join("link")).expect("a link");
    let (files, read) = files(&root);
    let host = host_with(files);
    let (mut stream, _) = front_end(&host).await;
    assert_eq!(done(&mut stream, load(1, "x", "a")).await, Ok(()));
    let (long_name, long_path) = ("n".repeat(257), "./".repeat(2049));
    for (key, (name, path, field, word)) in (2..).zip([
        ("x", "a", "lora_name", "taken"),
        ("", "a", "lora_name", "1 to 256 bytes"),
        ("a\nb", "a", "lora_name", "control"),
        (&long_name, "a", "lora_name", "1 to 256 bytes"),
        ("y", "bad", "lora_path", "no numbers"),
        ("y", "nowhere", "lora_path", "--lora-root"),
        ("y", "..", "lora_path", "--lora-root"),
        ("y", "a/../../outside", "lora_path", "--lora-root"),
        ("y", "link", "lora_path", "--lora-root"),
        ("y", outside.to_str().expect("a name"), "lora_path", "--lora-root"),
        ("y", "bad/fault", "lora_path", "--lora-root"),
        ("y", "a\0", "lora_path", "--lora-root"),
        ("y", &long_path, "lora_path", "--lora-root"),
    ]) {
        let refusal = done(&mut stream, load(key, name, path)).await.expect_err(path);
        assert_eq!(refusal.cause, Cause::Value(field.to_owned()));
        assert!(refusal.message.contains(word), "{refusal:?}");
    }
    assert_eq!(read.load(Ordering::Acquire), 2, "nothing is read but what may be");
    // Without a folder that they may load from, front ends have no say.
    let host = host_with(AdapterFiles::default());
    let (mut stream, _) = front_end(&host).await;
    for command in [load(1, "x", "a"), unload(2, "x")] {
        let refusal = done(&mut stream, command).await.expect_err("none is allowed");
        assert_eq!(refusal.cause, Cause::AdaptersNotAllowed);
    }
}

#[tokio::test]
async fn nobody_waits_for_files_that_are_slow() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("a")).expect("made");
    let (go_on, told_to) = channel::<Result<(), &str>>();
    let told_to = Mutex::new(told_to);
    let read = move |_: &Path| {
        let next = told_to.lock().expect("no panic").recv_timeout(PATIENCE).expect("it is told");
        next.expect("or it panics");
        Ok(AdapterBanks::default().random(0))
    };
    let root = Some(folder.path().canonicalize().expect("it is there"));
    let host = host_with(AdapterFiles { root, read: Box::new(read) });
    let (mut one, talk) = connected(&host);
    handshake::introduce(&mut one, None, 1 << 20).await.expect("let in");
    let (mut two, _) = front_end(&host).await;
    // One is read, 64 wait, and the last is one too many.
    for key in 1..=66 {
        send(&mut one, &ToEngine::Command(load(key, &format!("n{key}"), "a"))).await;
    }
    let (key, done_first) = told(&mut one).await.done.pop().expect("an answer");
    assert_eq!((key, done_first.map_err(|refusal| refusal.cause)), (66, Err(Cause::Busy)));
    served(&mut two, 1).await;
    served(&mut one, 100).await;
    go_on.send(Ok(())).expect("it waits");
    assert_eq!(adapters(&mut two).await, ["n1"]);
    assert_eq!(told(&mut one).await.done.pop(), Some((1, Ok(()))));
    // What a front end wanted that is gone is not read, but for what is being read.
    drop(one);
    assert!(talk.await.expect("no panic").is_err(), "it has left");
    go_on.send(Ok(())).expect("it waits");
    assert_eq!(adapters(&mut two).await, ["n1", "n2"]);
    assert_eq!(done(&mut two, unload(2, "n1")).await, Ok(()));
    go_on.send(Ok(())).expect("it waits");
    assert_eq!(done(&mut two, load(3, "next", "a")).await, Ok(()));
    assert_eq!(done(&mut two, unload(4, "next")).await, Ok(()));
}

#[tokio::test]
async fn which_adapters_there_are_is_told_while_the_engine_has_no_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let (handle, driver) = engine();
    let (mut driver, mut engine) = (driver.with_adapters(files(folder.path()).0), broken());
    driver.load_adapter(&mut engine, "x", folder.path()).expect("there is room");
    let taken = driver.load_adapter(&mut engine, "x", folder.path());
    assert!(matches!(taken, Err(AdapterRefused::Taken { .. })), "{taken:?}");
    let host = Host { handle, offer: offer(), secret: None, grammars: None, silence: PATIENCE };
    let (mut stream, adapters) = front_end(&Arc::new(host)).await;
    assert_eq!(adapters, ["x"]);
    std::thread::spawn(move || driver.run(engine, None));
    assert_eq!(asked(&mut stream, 1, "x").await, None);
}

#[tokio::test]
async fn a_bug_in_reading_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let calls = AtomicUsize::new(0);
    let read = move |_: &Path| {
        assert!(calls.fetch_add(1, Ordering::AcqRel) > 0, "a bug");
        Ok(AdapterBanks::default().random(0))
    };
    let root = Some(folder.path().canonicalize().expect("it is there"));
    let host = host_with(AdapterFiles { root, read: Box::new(read) });
    let (mut stream, _) = front_end(&host).await;
    let refusal = done(&mut stream, load(1, "x", ".")).await.expect_err("it panicked");
    assert_eq!(refusal.cause, Cause::Internal);
    assert_eq!(done(&mut stream, load(2, "x", ".")).await, Ok(()));
}

#[tokio::test]
async fn adapters_are_read_again_when_their_engine_wakes() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["a", "b"] {
        std::fs::create_dir(folder.path().join(name)).expect("made");
    }
    let (files, read) = files(folder.path());
    let (handle, driver) = engine();
    std::thread::spawn(move || driver.with_adapters(files).run(broken(), Made::default()));
    let host = Host { handle, offer: offer(), secret: None, grammars: None, silence: PATIENCE };
    let (mut stream, _) = front_end(&Arc::new(host)).await;
    for (key, name) in [(1, "a"), (2, "b")] {
        assert_eq!(done(&mut stream, load(key, name, name)).await, Ok(()));
    }
    let sleep = Command::Sleep(3, Sleep { depth: Depth::Deep, abort: false });
    assert_eq!(done(&mut stream, sleep).await, Ok(()));
    let asleep = done(&mut stream, load(4, "c", "a")).await.expect_err("it sleeps");
    assert_eq!(asleep.cause, Cause::Asleep);
    let fault = folder.path().join("b/fault");
    std::fs::write(&fault, "gone").expect("written");
    let why = done(&mut stream, Command::Wake(5)).await.expect_err("it cannot be read");
    assert!(why.message.contains("`b`: gone; unload it"), "{why:?}");
    assert_eq!(done(&mut stream, unload(6, "b")).await, Ok(()), "asleep as well");
    let before = read.load(Ordering::Acquire);
    assert_eq!(done(&mut stream, Command::Wake(7)).await, Ok(()));
    assert_eq!(read.load(Ordering::Acquire), before + 1);
    assert_eq!(asked(&mut stream, 8, "a").await, None);
    assert_eq!(asked(&mut stream, 9, "b").await, Some(Cause::NoAdapter));
}
