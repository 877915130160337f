//! Sampling options from a command line.

use clap::{Arg, ArgMatches, Command};
use infernum_runtime::{Number, SamplingOption, SamplingParams};

/// A flag for each of [`SamplingParams::OPTIONS`]: those that were given.
#[derive(Clone, Debug, Default)]
pub struct SamplingFlags(Vec<(&'static SamplingOption, Number)>);

impl SamplingFlags {
    /// `defaults`, with what was given in their place.
    pub fn params(&self, defaults: SamplingParams) -> SamplingParams {
        let mut params = defaults;
        for (option, value) in &self.0 {
            // In its range: the flag's parser saw to that.
            let _ = option.set(&mut params, *value);
        }
        params
    }
}

impl clap::Args for SamplingFlags {
    fn augment_args(command: Command) -> Command {
        command.next_help_heading("Sampling").args(SamplingParams::OPTIONS.iter().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        SamplingFlags::augment_args(command)
    }
}

impl clap::FromArgMatches for SamplingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<SamplingFlags, clap::Error> {
        let given = |option: &'static SamplingOption| {
            Some((option, *matches.get_one::<Number>(option.name)?))
        };
        Ok(SamplingFlags(SamplingParams::OPTIONS.iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = SamplingFlags::from_arg_matches(matches)?;
        Ok(())
    }
}

fn flag(option: &'static SamplingOption) -> Arg {
    let parse = |text: &str| {
        let value = text.parse()?;
        let set = option.set(&mut SamplingParams::default(), value);
        set.map(|()| value).map_err(|e| e.to_string())
    };
    Arg::new(option.name)
        .long(option.name.replace('_', "-"))
        .value_name(if option.whole { "N" } else { "X" })
        .help(format!("{} {}", option.doc(), option.range))
        .allow_negative_numbers(true)
        .value_parser(parse)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        sampling: SamplingFlags,
    }

    #[test]
    fn every_option_is_a_flag_with_its_range() {
        let parse = |line: &str| Line::try_parse_from(line.split(' '));
        let defaults = SamplingParams { temperature: 0.6, top_k: 20, ..SamplingParams::GREEDY };
        let given = parse("x --top-k -1 --frequency-penalty -0.5 --min-tokens 3 --seed 7");
        let params = given.unwrap_or_else(|e| panic!("{e}")).sampling.params(defaults);
        let expected = SamplingParams {
            top_k: 0,
            frequency_penalty: -0.5,
            min_tokens: 3,
            seed: 7,
            ..defaults
        };
        assert_eq!(params, expected);
        let wrong = parse("x --top-p 1.5").err().expect("out of range").to_string();
        assert!(wrong.contains("`top_p`: expected above 0 and at most 1, found 1.5"), "{wrong}");
        assert!(parse("x --top-k 1.5").is_err() && parse("x --temperature hot").is_err());
        let command = <Line as clap::CommandFactory>::command();
        for option in SamplingParams::OPTIONS {
            let flag = command.get_arguments().find(|a| a.get_id() == option.name).expect("a flag");
            let help = flag.get_help().expect("help").to_string();
            assert!(help.starts_with(&option.doc()), "{help}");
        }
    }
}
