//! One file a command.

pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod families;
pub(crate) mod generate;
