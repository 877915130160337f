//! An encoding's file.

use infernum_frontend_hf::spec::{Entries, Source};
use infernum_ir::encoding::{Code, CodeKind, EncodingDef, EncodingFault, FaultIn, Group, Stored};
use infernum_ir::{Encoding, SourceError};
use serde::Deserialize;

/// `Encoding(..)`, as written.
#[derive(Deserialize)]
#[serde(rename = "Encoding", deny_unknown_fields)]
pub(super) struct File<'a> {
    pub(super) name: &'a str,
    doc: &'a str,
    #[serde(borrow)]
    stored: StoredFile<'a>,
    #[serde(default)]
    tables: Entries<'a, Vec<f64>>,
    group: GroupFile,
    #[serde(borrow)]
    code: CodeFile<'a>,
    scale: &'a str,
    #[serde(default)]
    minimum: Option<&'a str>,
    #[serde(default)]
    when: Option<&'a str>,
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
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupFile {
    #[serde(default)]
    n: Option<u64>,
    #[serde(default)]
    k: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CodeFile<'a> {
    kind: CodeKind,
    bits: u32,
    value: &'a str,
}

/// Reads the encoding of a file.
pub(super) fn read(source: &Source, file: &File<'_>) -> Result<Encoding, SourceError> {
    let owned = |list: &Entries<'_, &str>| -> Vec<(String, String)> {
        list.iter().map(|(name, ty)| (name.to_owned(), (*ty).to_owned())).collect()
    };
    let (stored, parts) = match &file.stored {
        StoredFile::Blocks { values, fields } => {
            (Stored::Blocks { values: *values, fields: owned(fields) }, fields)
        }
        StoredFile::Tensors { of, tensors } => {
            (Stored::Tensors { of: (*of).to_owned(), tensors: owned(tensors) }, tensors)
        }
    };
    let text = |text: Option<&str>| text.map(str::to_owned);
    let def = EncodingDef {
        name: file.name.to_owned(),
        doc: file.doc.split_whitespace().collect::<Vec<_>>().join(" "),
        stored,
        tables: file.tables.iter().map(|(name, list)| (name.to_owned(), list.clone())).collect(),
        group: Group { n: file.group.n, k: file.group.k },
        code: Code {
            kind: file.code.kind,
            bits: file.code.bits,
            value: file.code.value.to_owned(),
        },
        scale: file.scale.to_owned(),
        minimum: text(file.minimum),
        when: text(file.when),
        gguf: file.gguf,
        packed: false,
    };
    Encoding::new(def).map_err(|EncodingFault { of, at: offset, message }| {
        let slice = match of {
            FaultIn::Name => file.name,
            FaultIn::Part(i) => parts.iter().nth(i).map_or(file.name, |(_, ty)| ty),
            FaultIn::Code => file.code.value,
            FaultIn::Scale => file.scale,
            FaultIn::Minimum => file.minimum.unwrap_or(file.name),
            FaultIn::When => file.when.unwrap_or(file.name),
        };
        match offset {
            0 => source.at(slice, message),
            _ => source.at_offset(slice, offset, message),
        }
    })
}
