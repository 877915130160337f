use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;

/// A file with this header and `data` zero bytes.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.resize(out.len() + data, 0);
    out
}

fn item(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}"#)
}

fn refusal(header: &str, data: usize) -> String {
    Header::parse(&file(header, data)).unwrap_err().to_string()
}

#[test]
fn a_valid_file_is_read_by_name() {
    let header = format!(
        r#" {{"__metadata__":{{"format":"pt"}},{},{} , {}}}  "#,
        item("b", "F32", "2, 1", 2, 10),
        item("a", "BF16", "", 0, 2),
        item("empty", "F64", "0,3", 10, 10),
    );
    let bytes = file(&header, 10);
    let parsed = Header::parse(&bytes).unwrap();
    let names: Vec<_> = parsed.entries().iter().map(|e| parsed.name(&bytes, e)).collect();
    assert_eq!(names, ["a", "b", "empty"]);
    let b = parsed.find(&bytes, "b").unwrap();
    assert_eq!((b.dtype(), parsed.shape(b), b.len()), (StoredType::F32, &[2, 1][..], 8));
    assert_eq!(parsed.data(&bytes, b).as_ptr(), bytes[bytes.len() - 8..].as_ptr());
    assert!(parsed.find(&bytes, "c").is_none());
}

#[test]
fn escaped_names_are_decoded() {
    let header = format!(
        "{{{},{}}}",
        item(r#"q\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00z"#, "U8", "1", 0, 1),
        item("plain", "U8", "1", 1, 2),
    );
    let bytes = file(&header, 2);
    let parsed = Header::parse(&bytes).unwrap();
    assert!(parsed.find(&bytes, "q\"\\/\u{8}\u{c}\n\r\té😀z").is_some());
    assert!(parsed.find(&bytes, "plain").is_some());
}

#[test]
fn each_lie_is_refused_by_name() {
    let f32s = |begin, end| format!("{{{}}}", item("a", "F32", "2,3", begin, end));
    let two = |first: (u64, u64), second: (u64, u64)| {
        let len = |(begin, end): (u64, u64)| (end - begin).to_string();
        format!(
            "{{{},{}}}",
            item("a", "U8", &len(first), first.0, first.1),
            item("b", "U8", &len(second), second.0, second.1)
        )
    };
    let cases = [
        (f32s(0, 20), 20, "`a`: shape [2, 3] of F32 needs 24 bytes, data_offsets span 20"),
        (f32s(0, 24), 20, "[0, 24] end beyond the 20 bytes"),
        (f32s(0, 24), 25, "holds 25 bytes of data, its tensors cover only 24"),
        (f32s(24, 0), 24, "[24, 0] descend"),
        (f32s(4, 28), 28, "begins at 4, but the previous tensor ends at 0"),
        (two((0, 4), (3, 6)), 6, "`b`: data begins at 3, inside the previous"),
        (two((0, 4), (5, 6)), 6, "belong to no tensor"),
        (format!("{{{}}}", item("a", "F31", "1", 0, 4)), 4, "`a`: unknown dtype `F31`"),
        (format!("{{{}}}", item("a", "F4", "1", 0, 1)), 1, "has no byte length"),
        (
            format!("{{{}}}", item("a", "F32", "4294967296,4294967296", 0, 0)),
            0,
            "has no byte length (too large",
        ),
        (
            format!("{{{}}}", item("a", "U8", "1,1,1,1,1,1,1,1,1", 0, 1)),
            1,
            "more than 8 dimensions",
        ),
        (format!("{{{0},{0}}}", item("a", "U8", "0", 0, 0)), 0, "`a`: is listed twice"),
        // The same name, once spelt with an escape.
        (
            format!("{{{},{}}}", item("a", "U8", "0", 0, 0), item("\\u0061", "U8", "0", 0, 0)),
            0,
            "`a`: is listed twice",
        ),
        (r#"{"a":{"dtype":"U8","shape":[0]}}"#.into(), 0, "`data_offsets` is missing"),
        (r#"{"a":{"dtype":"U8","dtype":"U8"}}"#.into(), 0, "`dtype` is given twice"),
        (r#"{"a":{"size":1}}"#.into(), 0, "unknown field `size`"),
        (format!("{{{}}}", item("a", "U8", "-1", 0, 0)), 0, "expected a whole number"),
        (format!("{{{}}}", item("a", "U8", "1e3", 0, 0)), 0, "expected `,` or `]`"),
        (r#"{"a\ud800":{}}"#.into(), 0, "expected a valid escape"),
        (r#"{"a"#.into(), 0, "expected a closing quote, found the end"),
        ("{} x".into(), 0, "byte 11: header: expected the end of the header, found `x`"),
        (String::new(), 0, "expected `{`"),
    ];
    for (header, data, expected) in cases {
        let message = refusal(&header, data);
        assert!(message.contains(expected), "{header}\n{message}\nlacks {expected}");
    }
}

#[test]
fn a_lying_length_is_refused() {
    let with_length = |len: u64| [&len.to_le_bytes()[..], b"{}"].concat();
    assert_eq!(Header::parse(&with_length(2)).unwrap().len(), 0);
    assert!(matches!(
        Header::parse(&with_length(3)),
        Err(HeaderError::HeaderTruncated { header_len: 3, file_len: 10 })
    ));
    for len in [100_000_001, u64::MAX] {
        assert!(matches!(Header::parse(&with_length(len)), Err(HeaderError::HeaderTooLong { .. })));
    }
    assert!(matches!(Header::parse(b"1234567"), Err(HeaderError::TooShort { file_len: 7 })));
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert_eq!(Header::parse(pointer).unwrap_err(), HeaderError::LfsPointer);
    let mut bad = file("{\"a\u{e9}\"", 0);
    bad.truncate(bad.len() - 2);
    bad[0] -= 2;
    assert!(matches!(Header::parse(&bad), Err(HeaderError::NotUtf8 { at: 11 })));
}

#[test]
fn messages_stay_short_and_printable() {
    let name = "\u{1b}".to_string() + &"x".repeat(10_000);
    let message = refusal(&format!("{{{}}}", item(&name[1..], "U8", "1", 0, 0)), 0);
    assert!(message.len() < 400, "{message}");
    assert_eq!(shown(&name).find('\u{1b}'), None);
}

#[test]
fn every_type_agrees_with_the_reference_crate() {
    for dtype in StoredType::ALL {
        let len = dtype.byte_len(&[8]).unwrap();
        let bytes = file(&format!("{{{}}}", item("a", dtype.name(), "8", 0, len)), len as usize);
        assert_eq!(Header::parse(&bytes).unwrap().entries()[0].dtype(), *dtype);
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(theirs.tensor("a").unwrap().dtype().to_string(), dtype.name());
    }
}

#[test]
fn what_we_write_the_reference_crate_reads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let half = [half::bf16::from_f32(1.5), half::bf16::from_f32(-2.0), half::bf16::ONE];
    let tensors = [
        TensorOut { name: "h", shape: &[3], data: TensorData::Bf16(&half) },
        TensorOut { name: "logits", shape: &[1, 2], data: TensorData::F32(&[0.5, f32::MIN]) },
        TensorOut { name: "\"d\"", shape: &[], data: TensorData::F64(&[std::f64::consts::PI]) },
    ];
    write_safetensors(&path, &tensors).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    let ours = Header::parse(&bytes).unwrap();
    assert_eq!((theirs.len(), ours.len()), (3, 3));
    for (name, tensor) in theirs.tensors() {
        let entry = ours.find(&bytes, &name).unwrap();
        assert_eq!(ours.data(&bytes, entry), tensor.data());
        assert_eq!(entry.offset() % 2, 0);
    }
    assert_eq!(theirs.tensor("h").unwrap().data(), [0xc0, 0x3f, 0x00, 0xc0, 0x80, 0x3f]);
    let pi = theirs.tensor("\"d\"").unwrap();
    assert_eq!(pi.data(), std::f64::consts::PI.to_le_bytes());
    assert!(std::fs::read_dir(dir.path()).unwrap().count() == 1, "the temporary file is gone");
}

#[test]
fn the_writer_refuses_what_it_could_not_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let tensor = |name, shape| TensorOut { name, shape, data: TensorData::F32(&[0.0; 4]) };
    let shape = write_safetensors(&path, &[tensor("a", &[3])]);
    assert!(matches!(shape, Err(WriteError::Shape { len: 4, .. })));
    let twice = write_safetensors(&path, &[tensor("a", &[4]), tensor("a", &[2, 2])]);
    assert!(matches!(twice, Err(WriteError::Name { .. })));
    let reserved = write_safetensors(&path, &[tensor("__metadata__", &[4])]);
    assert!(matches!(reserved, Err(WriteError::Name { .. })));
    assert!(!path.exists());
}

/// A random valid file, made without either reader.
fn valid_file() -> impl Strategy<Value = Vec<u8>> {
    let tensor =
        ("[a-z.\u{e9}]{0,6}", 0..StoredType::ALL.len(), prop::collection::vec(0..4_u64, 0..4));
    (prop::collection::vec(tensor, 0..6), 0..9_usize, any::<bool>()).prop_map(
        |(tensors, pad, metadata)| {
            let (mut items, mut begin) = (Vec::new(), 0);
            if metadata {
                items.push(r#""__metadata__":{"format":"p\u0074"}"#.to_string());
            }
            for (i, (name, dtype, mut shape)) in tensors.into_iter().enumerate() {
                let dtype = StoredType::ALL[dtype];
                if dtype.byte_len(&shape).is_none() {
                    shape.push(4);
                }
                let end = begin + dtype.byte_len(&shape).unwrap();
                let dims: Vec<_> = shape.iter().map(u64::to_string).collect();
                items.push(item(&format!("{name}{i}"), dtype.name(), &dims.join(","), begin, end));
                begin = end;
            }
            items.reverse(); // the header's order is not the data's
            file(&format!("{{{}}}{}", items.join(","), " ".repeat(pad)), begin as usize)
        },
    )
}

/// A change that keeps the file plausible: a byte, a cut, an insertion, or another digit.
fn corrupted() -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), any::<u8>(), 0..5_u8);
    (valid_file(), prop::collection::vec(change, 1..4)).prop_map(|(mut bytes, changes)| {
        for (at, byte, kind) in changes {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.truncate(at),
                2 => bytes.insert(at, byte),
                3 => bytes[at] = b"0123456789,:{}[]\"\\ "[usize::from(byte) % 19],
                _ => drop(bytes.remove(at)),
            }
        }
        bytes
    })
}

/// Where we are stricter than the crate, by decision: repeated names (it keeps the last), unknown
/// fields (it skips them), escapes in a dtype or field name, and high ranks.
fn stricter(error: &HeaderError) -> bool {
    matches!(
        error,
        HeaderError::Duplicate { .. }
            | HeaderError::UnknownField { .. }
            | HeaderError::TooManyDims { .. }
            | HeaderError::LfsPointer
    )
}

fn agree(bytes: &[u8]) -> Result<(), TestCaseError> {
    let theirs = SafeTensors::deserialize(bytes);
    match (Header::parse(bytes), theirs) {
        (Ok(ours), Ok(theirs)) => {
            prop_assert_eq!(ours.len(), theirs.len());
            for (name, tensor) in theirs.tensors() {
                let entry = ours.find(bytes, &name).expect("the same names");
                let shape: Vec<u64> = tensor.shape().iter().map(|&d| d as u64).collect();
                prop_assert_eq!(ours.shape(entry), shape);
                prop_assert_eq!(ours.data(bytes, entry), tensor.data());
                prop_assert_eq!(entry.dtype().name(), tensor.dtype().to_string());
            }
        }
        (Err(error), Ok(_)) => prop_assert!(stricter(&error), "only we refuse: {}", error),
        (Ok(_), Err(error)) => prop_assert!(false, "only they refuse: {}", error),
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn valid_files_are_accepted(bytes in valid_file()) {
        prop_assert!(Header::parse(&bytes).is_ok());
        agree(&bytes)?;
    }

    #[test]
    fn corrupt_files_never_panic_and_are_judged_as_the_reference_does(bytes in corrupted()) {
        agree(&bytes)?;
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        agree(&bytes)?;
        let header: String = bytes.iter().map(|b| char::from(b % 128)).collect();
        agree(&file(&header, 4))?;
    }
}

/// A pipe stands for whatever is no file: replacing /dev/null by a file would break the machine.
#[cfg(unix)]
#[test]
fn what_is_no_file_is_written_to_and_stays() {
    use std::os::unix::fs::FileTypeExt;
    let dir = tempfile::tempdir().expect("a folder");
    let pipe = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).expect("what was written")
    });
    let tensor = TensorOut { name: "x", shape: &[2], data: TensorData::F32(&[1.0, 2.0]) };
    write_safetensors(&pipe, &[tensor]).expect("written");
    let bytes = reader.join().expect("a reader");
    let read = SafeTensors::deserialize(&bytes).expect("a whole file");
    assert_eq!(read.tensor("x").expect("x").data().len(), 8);
    let kind = std::fs::metadata(&pipe).expect("still there").file_type();
    assert!(kind.is_fifo(), "{kind:?}");
}
