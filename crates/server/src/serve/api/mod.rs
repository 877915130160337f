//! The routes' handlers.

pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completions;
pub(crate) mod models;
pub(crate) mod options;
pub(crate) mod pages;
pub(crate) mod read;
pub(crate) mod system;
pub(crate) mod tokens;
