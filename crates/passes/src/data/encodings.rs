//! An encoding's file: one encoding, or one for each value of its parameters.

use std::fmt;

use infernum_frontend_hf::spec::{Arg, Entries, Source};
use infernum_ir::encoding::{Code, CodeKind, EncodingDef, EncodingFault, FaultIn, Group, Stored};
use infernum_ir::expr::{Expr, Value};
use infernum_ir::{Encoding, SourceError};
use serde::Deserialize;
use serde::de::{SeqAccess, Visitor};

/// Encodings that one file may define, and numbers in all their tables.
const MOST: usize = 256;
const MOST_ENTRIES: usize = 1 << 18;

/// `Encoding(..)`, as written.
#[derive(Deserialize)]
#[serde(rename = "Encoding", deny_unknown_fields)]
pub(super) struct File<'a> {
    pub(super) name: &'a str,
    doc: &'a str,
    #[serde(borrow, default)]
    each: Entries<'a, Vec<Arg<'a>>>,
    #[serde(borrow)]
    stored: StoredFile<'a>,
    #[serde(borrow, default)]
    tables: Entries<'a, List<'a>>,
    #[serde(borrow, default, rename = "let")]
    lets: Entries<'a, &'a str>,
    #[serde(borrow)]
    group: GroupFile<'a>,
    #[serde(borrow)]
    code: CodeFile<'a>,
    #[serde(default)]
    zero: Option<&'a str>,
    scale: &'a str,
    #[serde(default)]
    minimum: Option<&'a str>,
    #[serde(default)]
    when: Option<&'a str>,
    #[serde(default)]
    activations: Option<&'a str>,
    #[serde(default)]
    gguf: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
enum StoredFile<'a> {
    Blocks {
        values: u64,
        #[serde(borrow)]
        fields: Entries<'a, &'a str>,
    },
    Tensors {
        of: &'a str,
        #[serde(borrow)]
        tensors: Entries<'a, &'a str>,
        #[serde(borrow, default)]
        broadcast: Vec<&'a str>,
        #[serde(borrow, default)]
        unused: Vec<&'a str>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupFile<'a> {
    #[serde(borrow, default)]
    n: Option<Arg<'a>>,
    #[serde(borrow, default)]
    k: Option<Arg<'a>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CodeFile<'a> {
    kind: CodeKind,
    #[serde(borrow)]
    bits: Arg<'a>,
    value: &'a str,
}

/// `Table(..)`, a file of its own for a long list.
#[derive(Deserialize)]
#[serde(rename = "Table", deny_unknown_fields)]
pub(super) struct TableFile<'a> {
    pub(super) name: &'a str,
    #[allow(dead_code, reason = "for those who read the file")]
    doc: &'a str,
    pub(super) values: Vec<f64>,
}

/// Numbers, or the name of a file that has them.
enum List<'a> {
    Here(Vec<f64>),
    Named(&'a str),
}

impl<'de: 'a, 'a> Deserialize<'de> for List<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Lists;

        impl<'de> Visitor<'de> for Lists {
            type Value = List<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of numbers, or the name of a table")
            }

            fn visit_borrowed_str<E>(self, name: &'de str) -> Result<List<'de>, E> {
                Ok(List::Named(name))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<List<'de>, A::Error> {
                let mut values = Vec::new();
                while let Some(x) = list.next_element()? {
                    values.push(x);
                }
                Ok(List::Here(values))
            }
        }

        from.deserialize_any(Lists)
    }
}

/// Reads the encodings of a file; `tables` are those that have names of their own.
pub(super) fn read(
    source: &Source,
    file: &File<'_>,
    tables: &[(String, Vec<f64>)],
) -> Result<Vec<Encoding>, SourceError> {
    let lists = file.tables.iter().map(|(name, list)| {
        let values = match list {
            List::Here(values) => values.clone(),
            List::Named(wanted) => {
                let found = tables.iter().find(|(known, _)| known == wanted);
                found.map(|(_, values)| values.clone()).ok_or_else(|| {
                    let hint = infernum_ir::nearest(wanted, tables.iter().map(|(n, _)| n.as_str()));
                    let message = format!("no file of `kernels/tables/` is named `{wanted}`{hint}");
                    source.at(wanted, message)
                })?
            }
        };
        Ok((name.to_owned(), values))
    });
    let lists = lists.collect::<Result<Vec<_>, SourceError>>()?;
    let all = combinations(source, file)?;
    let entries: usize = lists.iter().map(|(_, values)| values.len()).sum();
    if entries.saturating_mul(all.len()) > MOST_ENTRIES {
        let message = format!(
            "expected at most {MOST_ENTRIES} numbers in the tables of its encodings, found {entries} in each of {}",
            all.len()
        );
        return Err(source.at(file.name, message));
    }
    all.into_iter().map(|constants| define(source, file, &lists, constants)).collect()
}

/// Every choice of a value for each parameter; one of none where there are no parameters.
fn combinations(
    source: &Source,
    file: &File<'_>,
) -> Result<Vec<Vec<(String, Value)>>, SourceError> {
    let mut all: Vec<Vec<(String, Value)>> = vec![Vec::new()];
    for (name, values) in file.each.iter() {
        let mut more = Vec::new();
        for chosen in &all {
            for value in values {
                let value = match value {
                    Arg::Num(n) => Value::Num(*n),
                    Arg::Text(text) => Value::Str((*text).to_owned()),
                    _ => return Err(source.at(name, "expected a list of numbers or of texts")),
                };
                let mut chosen = chosen.clone();
                chosen.push((name.to_owned(), value));
                more.push(chosen);
            }
        }
        if more.is_empty() || more.len() > MOST {
            let message = format!("expected 1 to {MOST} choices of values, found {}", more.len());
            return Err(source.at(name, message));
        }
        all = more;
    }
    Ok(all)
}

/// The encoding that these values of its parameters make.
fn define(
    source: &Source,
    file: &File<'_>,
    tables: &[(String, Vec<f64>)],
    constants: Vec<(String, Value)>,
) -> Result<Encoding, SourceError> {
    let owned = |list: &Entries<'_, &str>| -> Vec<(String, String)> {
        list.iter().map(|(name, ty)| (name.to_owned(), (*ty).to_owned())).collect()
    };
    let all = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
    let (stored, parts) = match &file.stored {
        StoredFile::Blocks { values, fields } => {
            (Stored::Blocks { values: *values, fields: owned(fields) }, fields)
        }
        StoredFile::Tensors { of, tensors, broadcast, unused } => {
            let (broadcast, unused) = (all(broadcast), all(unused));
            let of = (*of).to_owned();
            (Stored::Tensors { of, tensors: owned(tensors), broadcast, unused }, tensors)
        }
    };
    let text = |text: Option<&str>| text.map(str::to_owned);
    let number = |arg: &Arg<'_>, what: &str| number(source, file.name, &constants, arg, what);
    let extent = |arg: &Option<Arg<'_>>| match arg {
        None => Ok(None),
        Some(arg) => number(arg, "group"),
    };
    let bits = number(&file.code.bits, "bits")?.unwrap_or(0);
    let def = EncodingDef {
        name: name_of(file.name, &constants),
        doc: file.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        stored,
        tables: tables.to_vec(),
        lets: owned(&file.lets),
        group: Group { n: extent(&file.group.n)?, k: extent(&file.group.k)? },
        code: Code {
            kind: file.code.kind,
            bits: u32::try_from(bits).unwrap_or(u32::MAX),
            value: file.code.value.to_owned(),
        },
        zero: text(file.zero),
        scale: file.scale.to_owned(),
        minimum: text(file.minimum),
        when: text(file.when),
        activations: text(file.activations),
        gguf: file.gguf,
        constants,
        packed: false,
    };
    Encoding::new(def).map_err(|EncodingFault { of, at: offset, message }| {
        let slice = match of {
            FaultIn::Name => file.name,
            FaultIn::Part(i) => parts.iter().nth(i).map_or(file.name, |(_, ty)| ty),
            FaultIn::Let(i) => file.lets.iter().nth(i).map_or(file.name, |(_, text)| text),
            FaultIn::Code => file.code.value,
            FaultIn::Zero => file.zero.unwrap_or(file.name),
            FaultIn::Scale => file.scale,
            FaultIn::Minimum => file.minimum.unwrap_or(file.name),
            FaultIn::When => file.when.unwrap_or(file.name),
            FaultIn::Activations => file.activations.unwrap_or(file.name),
        };
        match offset {
            0 => source.at(slice, message),
            _ => source.at_offset(slice, offset, message),
        }
    })
}

/// A name in which `{p}` stands for the value of the parameter `p`.
fn name_of(text: &str, constants: &[(String, Value)]) -> String {
    constants.iter().fold(text.to_owned(), |name, (parameter, value)| {
        let value = match value {
            Value::Str(text) => text.clone(),
            other => other.to_string(),
        };
        name.replace(&format!("{{{parameter}}}"), &value)
    })
}

/// A number, or an expression over the parameters that is one; `None` where it is null.
fn number(
    source: &Source,
    name: &str,
    constants: &[(String, Value)],
    arg: &Arg<'_>,
    what: &str,
) -> Result<Option<u64>, SourceError> {
    let known = |name: &str| Some(constants.iter().find(|(c, _)| c == name)?.1.clone());
    let (place, value) = match arg {
        Arg::Num(n) => (name, Value::Num(*n)),
        Arg::Null => (name, Value::Null),
        Arg::Bool(b) => (name, Value::Bool(*b)),
        Arg::Text(text) => {
            let value = text.parse::<Expr>().and_then(|e| e.eval(&known));
            (*text, value.map_err(|e| source.at(text, e.message))?)
        }
    };
    match value {
        Value::Null => Ok(None),
        Value::Num(n) if n.fract() == 0.0 && (0.0..9e15).contains(&n) => Ok(Some(n as u64)),
        other => Err(source.at(place, format!("`{what}`: expected a whole number, found {other}"))),
    }
}
