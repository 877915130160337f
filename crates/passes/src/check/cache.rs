//! Verdicts that were reached before, by the content of what was tried.
//!
//! An entry holds what its verdict was reached on, and is used where that is still the same: the
//! rule and every fused op that it mentions, as read; the trials; and the engine, whose primitives
//! are what all of these mean. Only verdicts that passed are kept. A cache that cannot be read or
//! written is no error: the rule is tried anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use infernum_ir::OPS;
use infernum_ir::body::Stmt;
use serde::{Deserialize, Serialize};

use super::{Outcome, Verdict, check_rule, place};
use crate::data::Rule;

/// A folder of verdicts, or none.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    dir: Option<PathBuf>,
}

/// A file of the cache.
#[derive(Serialize, Deserialize)]
struct Entry {
    /// What was tried. A hash alone names the file, so that two may share a name.
    key: String,
    planted: usize,
    /// Whether the rule is a definition.
    definition: bool,
    warnings: Vec<String>,
}

/// No entry is as long; whatever is, is none.
const LONGEST: u64 = 1 << 20;

impl Cache {
    /// No cache: every rule is tried.
    pub fn off() -> Cache {
        Cache::default()
    }

    /// A cache in `dir/verdicts`, which is made when it is needed.
    pub fn at(dir: &Path) -> Cache {
        Cache { dir: Some(dir.join("verdicts")) }
    }

    /// As [`check_rule`], from the cache if the verdict is there.
    pub fn check_rule(&self, rule: &Rule, seed: u64, trials: usize) -> Verdict {
        let Some(dir) = &self.dir else { return check_rule(rule, seed, trials) };
        let key = key(rule, seed, trials);
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let path = dir.join(format!("{:016x}.ron", hasher.finish()));
        if let Some(entry) = read(&path).filter(|e| e.key == key) {
            return Verdict {
                rule: rule.name.clone(),
                place: place(&rule.loc),
                planted: entry.planted,
                outcome: if entry.definition { Outcome::Definition } else { Outcome::Ok },
                warnings: entry.warnings,
                cached: true,
            };
        }
        let verdict = check_rule(rule, seed, trials);
        if verdict.passed() {
            let definition = matches!(verdict.outcome, Outcome::Definition);
            let (planted, warnings) = (verdict.planted, verdict.warnings.clone());
            // Without it the next run takes longer, and nothing else.
            let _ = write(&path, &Entry { key, planted, definition, warnings });
        }
        verdict
    }
}

fn read(path: &Path) -> Option<Entry> {
    let mut text = String::new();
    fs::File::open(path).ok()?.take(LONGEST).read_to_string(&mut text).ok()?;
    ron::from_str(&text).ok()
}

/// Readers see all of an entry or nothing.
fn write(path: &Path, entry: &Entry) -> Option<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    fs::create_dir_all(path.parent()?).ok()?;
    let unique = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(format!("{}-{}.tmp", unique.0, unique.1));
    let text = ron::to_string(entry).ok()?;
    let done = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
    if done.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    done.ok()
}

/// All that a verdict depends on. What trials do not look at is left out: the doc, `when`, and
/// where the rule is written.
fn key(rule: &Rule, seed: u64, trials: usize) -> String {
    let Rule { name, numerics, left, right, values, shapes, attrs, .. } = rule;
    let Rule { samples, roots, requires, .. } = rule;
    let mut key = engine();
    let _ = write!(
        key,
        "\nseed {seed}, {trials} trials\nrule {name} {numerics:?}\nvars {values:?} {shapes:?} \
         {attrs:?} {samples:?}\nleft {left:?}\nright {right:?}\nroots {roots:?}\nrequires {requires:?}"
    );
    let mut fused = BTreeMap::new();
    mentioned(left, &mut fused);
    mentioned(right, &mut fused);
    key.extend(fused.into_values());
    key
}

/// The fused ops of a body, and of their bodies.
fn mentioned(body: &[Stmt], found: &mut BTreeMap<&'static str, String>) {
    for stmt in body {
        let op = stmt.op;
        let Some(fused) = op.fused.as_ref().filter(|_| !found.contains_key(op.name)) else {
            continue;
        };
        let operands: Vec<_> = op.operands.iter().map(|o| (o.name, o.optional)).collect();
        let (name, attrs, body, results) = (op.name, op.attrs, &fused.body, &fused.results);
        let text = format!("\nop {name} {operands:?} {attrs:?} {results:?} {body:?}");
        found.insert(name, text);
        mentioned(&fused.body, found);
    }
}

/// The version, the declarations of the primitives, and which build this is: what a primitive
/// computes is code.
fn engine() -> String {
    let mut text = format!("infernum {}", env!("CARGO_PKG_VERSION"));
    let build = std::env::current_exe().and_then(fs::metadata);
    if let Ok(file) = build {
        let built = file.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        let _ =
            write!(text, ", {} bytes, built {}", file.len(), built.unwrap_or_default().as_nanos());
    }
    let mut hasher = DefaultHasher::new();
    for op in OPS {
        let operands: Vec<_> = op.operands.iter().map(|o| (o.name, o.optional)).collect();
        format!("{} {operands:?} {:?}", op.name, op.attrs).hash(&mut hasher);
    }
    let _ = write!(text, ", ops {:016x}", hasher.finish());
    text
}

#[cfg(test)]
mod tests {
    use infernum_frontend_hf::spec::Source;

    use super::*;
    use crate::data::Kernels;

    const OP: &str = r#"Fused(name: "twice", doc: "d", operands: ["x"], attrs: ["by: float"],
        body: { "a": scale(x: "x", by: "by * 1"), "y": inner(x: "a") }, results: ["y"])"#;
    const INNER: &str = r#"Fused(name: "inner", doc: "d", operands: ["x"],
        body: { "y": scale(x: "x", by: 2) }, results: ["y"])"#;
    const RULE: &str = r#"[Rule(name: "twice", numerics: reassoc, vars: { "x": "[T, K]" },
        left: { "y": scale(x: "x", by: "by"), "z": scale(x: "y", by: 2) },
        right: { "z": twice(x: "x", by: "by") })]"#;

    fn checked(cache: &Cache, ops: [&str; 2], rule: &str, trials: usize) -> Verdict {
        let mut kernels = Kernels::default();
        let sources = ops.iter().map(|text| Source::new("op.ron", text)).collect();
        kernels.define_all(sources).unwrap_or_else(|e| panic!("{e}"));
        kernels.add_rules(&Source::new("rules.ron", rule)).unwrap_or_else(|e| panic!("{e}"));
        cache.check_rule(&kernels.rules[0], 1, trials)
    }

    #[test]
    fn a_verdict_is_reached_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(dir.path());
        let first = checked(&cache, [OP, INNER], RULE, 20);
        assert!(first.passed() && !first.cached, "{first}");
        let second = checked(&cache, [OP, INNER], RULE, 20);
        assert!(second.cached);
        assert_eq!(first.to_string(), second.to_string());
        assert_eq!(first.planted, second.planted);
        // What trials do not look at does not matter.
        assert!(checked(&cache, [OP, INNER], &format!("\n\n{RULE}"), 20).cached);
        assert!(!checked(&Cache::off(), [OP, INNER], RULE, 20).cached);
    }

    #[test]
    fn whatever_a_verdict_depends_on_makes_it_another() {
        let dir = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(dir.path());
        assert!(checked(&cache, [OP, INNER], RULE, 20).passed());
        // One character of an op's body, of one that the body mentions, or of the rule.
        let wrong = checked(&cache, [&OP.replace("by * 1", "by * 3"), INNER], RULE, 20);
        assert!(!wrong.passed() && !wrong.cached, "{wrong}");
        let wrong = checked(&cache, [OP, &INNER.replace("by: 2", "by: 3")], RULE, 20);
        assert!(!wrong.passed() && !wrong.cached, "{wrong}");
        let wrong = checked(&cache, [OP, INNER], &RULE.replace("by: 2", "by: 3"), 20);
        assert!(!wrong.passed() && !wrong.cached, "{wrong}");
        // What failed is tried again.
        assert!(!checked(&cache, [OP, INNER], &RULE.replace("by: 2", "by: 3"), 20).cached);
        assert!(!checked(&cache, [OP, INNER], RULE, 21).cached);
        assert!(checked(&cache, [OP, INNER], RULE, 20).cached);
    }

    #[test]
    fn a_broken_cache_is_no_error() {
        let dir = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(dir.path());
        assert!(checked(&cache, [OP, INNER], RULE, 20).passed());
        let files = || fs::read_dir(dir.path().join("verdicts")).expect("made").flatten();
        let file = files().next().expect("an entry").path();
        assert_eq!(files().count(), 1, "nothing temporary is left");
        let good = fs::read(&file).expect("readable");
        let other_key = String::from_utf8_lossy(&good).replace("twice", "thrice").into_bytes();
        for broken in [&good[..good.len() / 2], b"\xff\x00", b"", &other_key] {
            fs::write(&file, broken).expect("writable");
            let verdict = checked(&cache, [OP, INNER], RULE, 20);
            assert!(verdict.passed() && !verdict.cached);
            assert!(checked(&cache, [OP, INNER], RULE, 20).cached, "it was written anew");
        }
        // A file where the folder should be.
        let blocked = Cache::at(&file);
        assert!(checked(&blocked, [OP, INNER], RULE, 20).passed());
        assert!(!checked(&blocked, [OP, INNER], RULE, 20).cached);
    }
}
