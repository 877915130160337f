//! From RON text to the typed structs, keeping borrowed names: their offsets place errors.

use std::fmt;
use std::marker::PhantomData;

use infernum_ir::{SourceError, nearest};
use ron::error::Error as RonError;
use serde::de::{
    self, Deserialize, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor,
};

use super::fields::SPEC;
use super::{Arg, Argument, Entries, Source, SpecCall};

/// A spec is a page or two of text.
const MAX_SPEC_BYTES: usize = 128 << 10;

pub(super) fn from_str<'a, T: Deserialize<'a>>(source: &'a Source) -> Result<T, SourceError> {
    let text = &*source.text;
    if text.len() > MAX_SPEC_BYTES {
        let message = format!("the file is larger than {MAX_SPEC_BYTES} bytes: not a spec");
        return Err(SourceError::new(&source.file, text, 0..0, message));
    }
    ron::Options::default()
        .with_default_extension(ron::extensions::Extensions::IMPLICIT_SOME)
        .with_recursion_limit(32)
        .from_str(text)
        .map_err(|e| {
            let mut start = SourceError::offset(text, e.span.start.line, e.span.start.col);
            start += text[start..].len() - text[start..].trim_start().len();
            let end = SourceError::offset(text, e.span.end.line, e.span.end.col);
            let message = message(&e.code, text[start..].chars().next());
            SourceError::new(&source.file, text, start..end.max(start + 1), message)
        })
}

/// RON's message in our words, with the nearest name where one was misspelt; `found` is the
/// character at the place.
fn message(code: &RonError, found: Option<char>) -> String {
    let expected = |what: &str| match found {
        Some(c) => format!("expected {what}, found `{c}`"),
        None => format!("expected {what}, found the end"),
    };
    match code {
        RonError::NoSuchStructField { expected, found, .. } => unknown("field", found, expected),
        RonError::NoSuchEnumVariant { expected, found, .. } => unknown("variant", found, expected),
        RonError::MissingStructField { field, .. } => format!("field `{field}` is missing"),
        RonError::DuplicateStructField { field, .. } => format!("`{field}` is written twice"),
        RonError::InvalidValueForType { expected, found } => {
            format!("expected {expected}, found {found}")
        }
        RonError::ExpectedIdentifier => expected("a name without quotes"),
        RonError::ExpectedString => expected("a text in quotes"),
        RonError::ExpectedComma => expected("a comma (or is a quote not closed before?)"),
        RonError::ExpectedMapColon => expected("`:`"),
        RonError::ExpectedMap => expected("`{`"),
        RonError::ExpectedArray => expected("`[`"),
        RonError::ExpectedStructLike => expected("`(`"),
        RonError::ExpectedNamedStructLike(name) => expected(&opening(name)),
        RonError::TrailingCharacters => expected("the end"),
        other => other.to_string(),
    }
}

/// How a structure begins: with the fields that it must have.
fn opening(name: &str) -> String {
    let Some(structure) = SPEC.iter().find(|s| s.name == name) else { return format!("`{name}(`") };
    let needed = structure.fields.iter().filter(|(_, needed, _)| *needed);
    let needed: Vec<String> = needed.map(|(field, ..)| format!("{field}: ..")).collect();
    format!("a {name}, `({})`", needed.join(", "))
}

fn unknown(what: &str, found: &str, expected: &[&str]) -> String {
    let hint = nearest(found, expected.iter().copied());
    format!("unknown {what} `{found}`{hint}; expected {}", expected.join(", "))
}

impl<'de: 'a, 'a, T: Deserialize<'de>> Deserialize<'de> for Entries<'a, T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Map<'a, T>(PhantomData<(&'a (), T)>);
        impl<'de: 'a, 'a, T: Deserialize<'de>> Visitor<'de> for Map<'a, T> {
            type Value = Entries<'a, T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("{ \"name\": value, .. }")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries: Vec<(&'a str, T)> = Vec::new();
                while let Some(name) = map.next_key::<&'de str>()? {
                    if entries.iter().any(|(k, _)| *k == name) {
                        return Err(de::Error::custom(format!("`{name}` is written twice")));
                    }
                    entries.push((name, map.next_value()?));
                }
                Ok(Entries(entries))
            }
        }
        d.deserialize_map(Map(PhantomData))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for SpecCall<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct CallVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for CallVisitor<'a> {
            type Value = SpecCall<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a call such as `add(a: \"x\", b: \"y\")`")
            }

            fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<SpecCall<'a>, A::Error> {
                let (Ident(name), variant) = data.variant()?;
                let args = variant.struct_variant(&[], ArgsVisitor(PhantomData))?;
                Ok(SpecCall { name, args })
            }
        }
        // An enum whose variants are not listed: the op set stays open.
        d.deserialize_enum("", &[], CallVisitor(PhantomData))
    }
}

/// A bare identifier.
struct Ident<'a>(&'a str);

impl<'de: 'a, 'a> Deserialize<'de> for Ident<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct IdentVisitor<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for IdentVisitor<'a> {
            type Value = Ident<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Ident<'a>, E> {
                Ok(Ident(name))
            }
        }
        d.deserialize_identifier(IdentVisitor(PhantomData))
    }
}

struct ArgsVisitor<'a>(PhantomData<&'a ()>);

impl<'de: 'a, 'a> Visitor<'de> for ArgsVisitor<'a> {
    type Value = Vec<(&'a str, Argument<'a>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("named arguments such as `(a: \"x\", b: \"y\")`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut args: Self::Value = Vec::new();
        while let Some(Ident(name)) = map.next_key()? {
            if args.iter().any(|(k, _)| *k == name) {
                return Err(de::Error::custom(format!("`{name}` is written twice")));
            }
            args.push((name, map.next_value()?));
        }
        Ok(args)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Arg<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match d.deserialize_any(ArgumentVisitor { lists: false, borrow: PhantomData })? {
            Argument::One(arg) => Ok(arg),
            Argument::List(_) | Argument::Names(_) => Err(de::Error::custom(NO_LIST)),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Argument<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(ArgumentVisitor { lists: true, borrow: PhantomData })
    }
}

const NO_LIST: &str = "expected a number or an expression, found a list";

struct ArgumentVisitor<'a> {
    /// Refused on sight where false, so that the error is at their start.
    lists: bool,
    borrow: PhantomData<&'a ()>,
}

impl<'de: 'a, 'a> Visitor<'de> for ArgumentVisitor<'a> {
    type Value = Argument<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, a flag, None, or an expression in quotes (without escapes)")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Argument::One(Arg::Text(text)))
    }

    fn visit_bool<E>(self, b: bool) -> Result<Self::Value, E> {
        Ok(Argument::One(Arg::Bool(b)))
    }

    fn visit_i64<E>(self, n: i64) -> Result<Self::Value, E> {
        Ok(Argument::One(Arg::Num(n as f64)))
    }

    fn visit_u64<E>(self, n: u64) -> Result<Self::Value, E> {
        Ok(Argument::One(Arg::Num(n as f64)))
    }

    fn visit_f64<E>(self, n: f64) -> Result<Self::Value, E> {
        Ok(Argument::One(Arg::Num(n)))
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(Argument::One(Arg::Null))
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Argument::One(Arg::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        if !self.lists {
            return Err(de::Error::custom(NO_LIST));
        }
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Arg<'a>>()? {
            items.push(item);
        }
        Ok(Argument::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        if !self.lists {
            return Err(de::Error::custom("expected a number or an expression, found a map"));
        }
        let names = Entries::deserialize(de::value::MapAccessDeserializer::new(map))?;
        Ok(Argument::Names(names))
    }
}
