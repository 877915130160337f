//! Options from the environment and from a file, below those of the command line.
//!
//! Both are turned into arguments, so that every option there is can be given in all three ways
//! and is checked in one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// What environment variables for options begin with.
const PREFIX: &str = "INFERNUM_";

/// An option that could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{path}: {source}; --config names a TOML file")]
    Io { path: String, source: std::io::Error },
    #[error("{place}: {message}")]
    Syntax { place: String, message: String },
    #[error("{place}: there is no option `{key}`{hint}")]
    Unknown { place: String, key: String, hint: String },
    #[error("{place}: `{key}`: {message}")]
    Value { place: String, key: String, message: String },
}

/// A value with where it stands.
struct Given {
    place: String,
    key: String,
    values: Vec<String>,
}

/// Parses the command line. What one of these subcommands was not given there is taken from the environment,
/// else from the file that its option `config` names.
pub fn layered(
    whole: &Command,
    subcommands: &[&str],
    arguments: Vec<OsString>,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<ArgMatches, Box<dyn std::error::Error>> {
    // What must be given may be given anywhere: it is asked for when all is there.
    let optional = |layer: Command| layer.mut_args(|arg| arg.required(false));
    let relaxed = |whole: Command, name: &&str| whole.mut_subcommand(*name, optional);
    let command = &subcommands.iter().fold(whole.clone(), relaxed);
    let matches = command.clone().try_get_matches_from(&arguments)?;
    let named = matches.subcommand().filter(|(name, _)| subcommands.contains(name));
    let Some((subcommand, given)) = named else {
        return Ok(whole.clone().try_get_matches_from(arguments)?);
    };
    let Some(layer) = command.find_subcommand(subcommand) else { return Ok(matches) };
    let written =
        |arg: &Arg| given.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let options = || layer.get_arguments().filter(|a| a.get_long().is_some_and(|l| l != "help"));
    let path = given.get_one::<PathBuf>("config").cloned();
    let path = path.or_else(|| variable(&variable_name("config")).map(PathBuf::from));
    let file = match &path {
        Some(path) => read(path, &options().collect::<Vec<_>>())?,
        None => Vec::new(),
    };
    let mut all = arguments;
    for arg in options().filter(|a| !written(a) && a.get_long() != Some("config")) {
        let found = from_environment(arg, variable).or_else(|| {
            file.iter().find(|g| Some(g.key.as_str()) == arg.get_long()).map(|g| Given {
                place: g.place.clone(),
                key: g.key.clone(),
                values: g.values.clone(),
            })
        });
        if let Some(found) = found {
            let arguments = as_arguments(arg, &found)?;
            alone(command, subcommand, &arguments, &found)?;
            all.extend(arguments);
            together(command, &all, &found)?;
        }
    }
    Ok(whole.clone().try_get_matches_from(all)?)
}

fn variable_name(long: &str) -> String {
    format!("{PREFIX}{}", long.replace('-', "_").to_uppercase())
}

fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// A variable's value; lists are separated by commas.
fn from_environment(arg: &Arg, variable: &dyn Fn(&str) -> Option<String>) -> Option<Given> {
    let key = arg.get_long()?.to_owned();
    let place = variable_name(&key);
    // Kubernetes sets such variables for a service of our name: INFERNUM_PORT=tcp://10.0.0.1:80
    let foreign = |v: &String| key == "port" && v.starts_with("tcp://");
    let value = variable(&place).filter(|v| !v.is_empty() && !foreign(v))?;
    let values = if is_list(arg) {
        value.split(',').map(|v| v.trim().to_owned()).filter(|v| !v.is_empty()).collect()
    } else {
        vec![value]
    };
    Some(Given { place, key, values })
}

fn as_arguments(arg: &Arg, given: &Given) -> Result<Vec<OsString>, ConfigError> {
    let flag = format!("--{}", given.key);
    let refuse = |message: String| ConfigError::Value {
        place: given.place.clone(),
        key: given.key.clone(),
        message,
    };
    if is_switch(arg) {
        let [value] = given.values.as_slice() else {
            return Err(refuse("expected true or false, found a list".to_owned()));
        };
        return match value.to_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(vec![flag.into()]),
            "false" | "0" | "no" | "off" => Ok(Vec::new()),
            _ => Err(refuse(format!("expected true or false, found `{value}`"))),
        };
    }
    if !is_list(arg) && given.values.len() != 1 {
        return Err(refuse("expected one value, found a list".to_owned()));
    }
    Ok(given.values.iter().map(|value| format!("{flag}={value}").into()).collect())
}

/// Checks arguments for themselves, so that an error can name where they stand.
fn alone(
    command: &Command,
    subcommand: &str,
    arguments: &[OsString],
    given: &Given,
) -> Result<(), ConfigError> {
    let line = [command.get_name().into(), subcommand.into()];
    let line = line.into_iter().chain(arguments.iter().cloned());
    let Err(error) = command.clone().try_get_matches_from(line) else { return Ok(()) };
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    // What follows is how to use the command line.
    let message = text.split("\n\n").next().unwrap_or_default().trim().to_owned();
    Err(ConfigError::Value { place: given.place.clone(), key: given.key.clone(), message })
}

/// Checks that the last of `all` goes with the others, so that an error can name where it stands.
fn together(command: &Command, all: &[OsString], last: &Given) -> Result<(), ConfigError> {
    let Err(error) = command.clone().try_get_matches_from(all) else { return Ok(()) };
    if error.kind() != ErrorKind::ArgumentConflict {
        return Ok(());
    }
    // A group that conflicts is named by all that it has: the option itself is one of them.
    let flag = format!("--{}", last.key);
    let is_other = |name: &&String| name.split([' ', '=']).next() != Some(flag.as_str());
    let kinds = [ContextKind::InvalidArg, ContextKind::PriorArg].into_iter();
    let named = kinds.filter_map(|kind| error.get(kind)).find_map(|value| match value {
        ContextValue::String(name) => Some(name).filter(is_other),
        ContextValue::Strings(names) if names.len() == 1 => names.first().filter(is_other),
        _ => None,
    });
    let other = named.map_or_else(|| "another option".to_owned(), |name| format!("`{name}`"));
    let (place, key) = (last.place.clone(), last.key.clone());
    Err(ConfigError::Value { place, key, message: format!("cannot be used with {other}") })
}

/// Reads a file's options.
fn read(path: &Path, options: &[&Arg]) -> Result<Vec<Given>, ConfigError> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Io { path: name.clone(), source })?;
    let place = |offset: usize| {
        let line = text.get(..offset).unwrap_or_default().matches('\n').count() + 1;
        format!("{name}:{line}")
    };
    let table = DeTable::parse(&text).map_err(|error| ConfigError::Syntax {
        place: place(error.span().map_or(0, |s| s.start)),
        message: error.message().to_owned(),
    })?;
    let mut all: Vec<Given> = Vec::new();
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in entries {
        let place = place(key.span().start);
        let written = key.get_ref().to_string();
        let key = written.replace('_', "-");
        let known = options.iter().filter_map(|a| a.get_long());
        if key == "config" || !known.clone().any(|long| long == key) {
            let hint =
                closest(&key, known).map_or(String::new(), |k| format!("; did you mean `{k}`?"));
            return Err(ConfigError::Unknown { place, key: written, hint });
        }
        if all.iter().any(|g| g.key == key) {
            let message = "is given twice".to_owned();
            return Err(ConfigError::Value { place, key, message });
        }
        let values = values(value).map_err(|message| ConfigError::Value {
            place: place.clone(),
            key: key.clone(),
            message,
        })?;
        all.push(Given { place, key, values });
    }
    Ok(all)
}

/// A value as one would write it on the command line; of a list each.
fn values(value: &Spanned<DeValue<'_>>) -> Result<Vec<String>, String> {
    match value.get_ref() {
        DeValue::Array(items) => {
            Ok(items.iter().map(values).collect::<Result<Vec<_>, _>>()?.concat())
        }
        DeValue::String(text) => Ok(vec![text.to_string()]),
        DeValue::Boolean(value) => Ok(vec![value.to_string()]),
        DeValue::Integer(number) => {
            let value = i128::from_str_radix(number.as_str(), number.radix());
            value.map(|v| vec![v.to_string()]).map_err(|e| e.to_string())
        }
        DeValue::Float(number) => Ok(vec![number.as_str().to_owned()]),
        DeValue::Datetime(_) => Err("expected a string, number or list, found a date".to_owned()),
        DeValue::Table(_) => Err("expected a string, number or list, found a table".to_owned()),
    }
}

fn closest<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known.map(|k| (strsim::jaro_winkler(key, k), k)).filter(|(score, _)| *score > 0.8);
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, k)| k)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, CommandFactory, FromArgMatches, Parser};

    use super::*;

    #[derive(Parser)]
    #[command(name = "infernum")]
    enum Cli {
        Serve(Box<crate::Args>),
        Engine(Box<crate::engine::Args>),
        Other,
    }

    type Parsed = Result<crate::Args, String>;

    fn parse(line: &str, environment: &[(&str, &str)], file: Option<&str>) -> Parsed {
        let folder = tempfile::tempdir().expect("a folder");
        let mut line: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
        if let Some(text) = file {
            let path = folder.path().join("c.toml");
            std::fs::write(&path, text).expect("a file");
            line.extend(["--config".into(), path.into()]);
        }
        let variable =
            |name: &str| environment.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let matches = layered(&Cli::command(), &["serve", "engine"], line, &variable);
        let matches = matches
            .map_err(|e| e.to_string().replace(&format!("{}/", folder.path().display()), ""))?;
        let serve = matches.subcommand_matches("serve").expect("serve");
        Ok(crate::Args::from_arg_matches(serve).expect("args"))
    }

    #[test]
    fn the_command_line_goes_before_the_environment_and_that_before_the_file() {
        let file = "port = 1\nqueue = 1\nmax_body_bytes = 0x10\nmodel = [\"a=x\", \"b=y\"]\nno-ahead = true\ncosts = \"c\"";
        let environment =
            [("INFERNUM_PORT", "2"), ("INFERNUM_QUEUE", "2"), ("INFERNUM_NO_GRAPHS", "1")];
        let args = parse("infernum serve --port 3", &environment, Some(file)).expect("it parses");
        assert_eq!(args.listen.port, 3);
        assert_eq!(args.limits.queue, 2);
        assert_eq!(args.limits.max_body_bytes, 16);
        assert!(args.host.engine.no_ahead && args.host.run.no_graphs && !args.host.run.no_overlap);
        assert_eq!(args.models.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(args.host.compile.costs.as_deref(), Some(Path::new("c")));
        // Lists are replaced, not added to.
        let args = parse("infernum serve --model c=z", &[("INFERNUM_API_KEY", "k, l")], Some(file));
        let args = args.expect("it parses");
        assert_eq!(args.models.len(), 1);
        assert_eq!(args.listen.api_key, ["k", "l"]);
        // What an orchestrator sets for a service of our name is not for us.
        let args = parse("infernum serve", &[("INFERNUM_PORT", "tcp://10.0.0.1:80")], None);
        assert_eq!(args.expect("it parses").listen.port, 8000);
    }

    #[test]
    fn errors_name_file_and_line() {
        let fails = |file: &str| parse("infernum serve", &[], Some(file)).expect_err(file);
        assert_eq!(
            fails("port = 1\nqeue = 2"),
            "c.toml:2: there is no option `qeue`; did you mean `queue`?"
        );
        assert_eq!(fails("[cuda]\npolicy = 1"), "c.toml:1: there is no option `cuda`");
        let found = fails("\n\nport = \"x\"");
        assert!(
            found.starts_with("c.toml:3: `port`: invalid value 'x' for '--port <PORT>'"),
            "{found}"
        );
        let found = fails("policy = \"lifo\"");
        assert!(found.starts_with("c.toml:1: `policy`: invalid value 'lifo'"), "{found}");
        assert_eq!(fails("port = [1, 2]"), "c.toml:1: `port`: expected one value, found a list");
        assert_eq!(
            fails("no_ahead = 3"),
            "c.toml:1: `no-ahead`: expected true or false, found `3`"
        );
        assert_eq!(
            fails("no_ahead = true\nno-ahead = true"),
            "c.toml:2: `no-ahead`: is given twice"
        );
        assert!(fails("port = 1\nqueue = ").starts_with("c.toml:2: "));
        assert!(fails("host = {a = 1}").ends_with("found a table"));
        let found = parse("infernum serve", &[("INFERNUM_PORT", "x")], None).expect_err("x");
        assert!(found.starts_with("INFERNUM_PORT: `port`: invalid value 'x'"), "{found}");
        let found = parse("infernum serve --config /no/file", &[], None).expect_err("no file");
        assert!(found.starts_with("/no/file: "), "{found}");
    }

    #[test]
    fn what_cannot_be_used_together_names_the_variable_or_the_line() {
        let line = "infernum serve --engine ipc:///tmp/engine";
        let variable = [("INFERNUM_GPU_MEMORY_UTILIZATION", "0.5")];
        let error = parse(line, &variable, None).expect_err("another process has the GPU");
        assert_eq!(
            error,
            "INFERNUM_GPU_MEMORY_UTILIZATION: `gpu-memory-utilization`: cannot be used with \
             `--engine <ADDRESS>`"
        );
        let error = parse(line, &[], Some("port = 1\nreproducible = true")).expect_err("as well");
        let end = ":2: `reproducible`: cannot be used with `--engine <ADDRESS>`";
        assert!(error.ends_with(end), "{error}");
    }

    #[test]
    fn an_engine_is_told_by_a_file_and_the_environment_too() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("e.toml");
        let file = "listen = \"ipc:///a\"\nqueue = 3\nmodel = \"m=x\"\nmax-sequences = 4";
        std::fs::write(&path, file).expect("a file");
        let parse = |line: &str, variables: &[(&str, &str)]| {
            let line = line.replace("FILE", path.to_str().expect("a name"));
            let line: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
            let variable = |name: &str| {
                variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
            };
            let matches = layered(&Cli::command(), &["serve", "engine"], line, &variable);
            let matches = matches.map_err(|e| e.to_string())?;
            let engine = matches.subcommand_matches("engine").expect("engine");
            Ok::<_, String>(crate::engine::Args::from_arg_matches(engine).expect("args"))
        };
        let args =
            parse("infernum engine --config FILE --queue 5", &[("INFERNUM_MAX_SEQUENCES", "2")]);
        let shown = format!("{:?}", args.expect("it parses"));
        for part in ["queue: 5", "max_sequences: Some(2)", "name: \"m\"", "Ipc(\"/a\")"] {
            assert!(shown.contains(part), "{part} is not in {shown}");
        }
        let missing = parse("infernum engine --queue 5", &[]).expect_err("no address");
        assert!(missing.contains("--listen <ADDRESS>"), "{missing}");
        std::fs::write(&path, "listen = \"nowhere\"").expect("a file");
        let wrong = parse("infernum engine --config FILE", &[]).expect_err("no address");
        assert!(wrong.contains("e.toml:1: `listen`: invalid value 'nowhere'"), "{wrong}");
        std::fs::write(&path, "port = 1").expect("a file");
        let wrong = parse("infernum engine --config FILE", &[]).expect_err("it has no port");
        assert!(wrong.contains("e.toml:1: there is no option `port`"), "{wrong}");
    }

    #[test]
    fn other_commands_are_left_alone() {
        let variable = |_: &str| Some("nonsense".to_owned());
        let line = vec!["infernum".into(), "other".into()];
        assert!(layered(&Cli::command(), &["serve", "engine"], line, &variable).is_ok());
    }

    #[test]
    fn all_options_can_be_given_everywhere() {
        let serve = crate::Args::augment_args(Command::new("serve"));
        let engine = crate::engine::Args::augment_args(Command::new("engine"));
        for arg in serve.get_arguments().chain(engine.get_arguments()) {
            let kinds =
                matches!(arg.get_action(), ArgAction::Set | ArgAction::SetTrue | ArgAction::Append);
            assert!(kinds && arg.get_long().is_some(), "{arg:?} has no place in a file");
        }
    }
}
