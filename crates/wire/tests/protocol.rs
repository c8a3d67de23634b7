//! Tests that the protocol follows the most important conventions of buf's STANDARD and COMMENTS lint rules.
//!
//! `npx @bufbuild/buf lint crates/wire/proto` checks all rules; this test needs nothing but Rust.
#![cfg(feature = "grpc")]

use std::collections::{BTreeMap, BTreeSet};

use faena_wire::v1::DESCRIPTOR;
use prost::Message;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet, field_descriptor_proto::Type,
};

fn files() -> Vec<FileDescriptorProto> {
    let set = FileDescriptorSet::decode(DESCRIPTOR).expect("a descriptor set");
    set.file.into_iter().filter(|file| file.package() == "faena.v1").collect()
}

// Field numbers in descriptor.proto. The path of a comment consists of such numbers and of indexes.
const MESSAGE_TYPE: i32 = 4;
const ENUM_TYPE: i32 = 5;
const SERVICE: i32 = 6;
const FIELD_OR_VALUE_OR_METHOD: i32 = 2;
const ONEOF: i32 = 8;

/// Everything in a file that must have a comment, by its path.
fn items(file: &FileDescriptorProto) -> BTreeMap<Vec<i32>, String> {
    let mut items = BTreeMap::new();
    let index = |index: usize| i32::try_from(index).expect("a small number");
    for (m, message) in file.message_type.iter().enumerate() {
        items.insert(vec![MESSAGE_TYPE, index(m)], message.name().to_owned());
        for (f, field) in message.field.iter().enumerate() {
            let path = vec![MESSAGE_TYPE, index(m), FIELD_OR_VALUE_OR_METHOD, index(f)];
            items.insert(path, format!("{}.{}", message.name(), field.name()));
        }
        // An `optional` field becomes a oneof of its own, which is not in the source.
        for (o, oneof) in message.oneof_decl.iter().enumerate().filter(|(_, oneof)| !oneof.name().starts_with('_')) {
            items.insert(vec![MESSAGE_TYPE, index(m), ONEOF, index(o)], format!("{}.{}", message.name(), oneof.name()));
        }
        assert!(message.nested_type.is_empty() && message.enum_type.is_empty(), "{} has nested types", message.name());
    }
    for (e, enumeration) in file.enum_type.iter().enumerate() {
        items.insert(vec![ENUM_TYPE, index(e)], enumeration.name().to_owned());
        for (v, value) in enumeration.value.iter().enumerate() {
            let path = vec![ENUM_TYPE, index(e), FIELD_OR_VALUE_OR_METHOD, index(v)];
            items.insert(path, value.name().to_owned());
        }
    }
    for (s, service) in file.service.iter().enumerate() {
        items.insert(vec![SERVICE, index(s)], service.name().to_owned());
        for (m, method) in service.method.iter().enumerate() {
            let path = vec![SERVICE, index(s), FIELD_OR_VALUE_OR_METHOD, index(m)];
            items.insert(path, format!("{}.{}", service.name(), method.name()));
        }
    }
    items
}

#[test]
fn every_item_has_a_comment() {
    for file in files() {
        let source = file.source_code_info.clone().expect("the descriptors keep comments");
        let commented: BTreeSet<Vec<i32>> = source
            .location
            .into_iter()
            .filter(|location| !location.leading_comments().trim().is_empty())
            .map(|location| location.path)
            .collect();
        let missing: Vec<String> =
            items(&file).into_iter().filter(|(path, _)| !commented.contains(path)).map(|(_, name)| name).collect();
        assert!(missing.is_empty(), "{}: without a comment: {missing:?}", file.name());
    }
}

/// `JobState` becomes `JOB_STATE_`.
fn prefix(enumeration: &EnumDescriptorProto) -> String {
    let mut prefix = String::new();
    for character in enumeration.name().chars() {
        if character.is_uppercase() && !prefix.is_empty() {
            prefix.push('_');
        }
        prefix.push(character.to_ascii_uppercase());
    }
    prefix + "_"
}

#[test]
fn enum_values_have_their_prefix_and_zero_is_unspecified() {
    for enumeration in files().iter().flat_map(|file| &file.enum_type) {
        let prefix = prefix(enumeration);
        for value in &enumeration.value {
            assert!(value.name().starts_with(&prefix), "{} must start with {prefix}", value.name());
            let is_unspecified = value.name() == format!("{prefix}UNSPECIFIED");
            assert_eq!(value.number() == 0, is_unspecified, "{}", value.name());
        }
    }
}

#[test]
fn every_method_has_a_request_and_a_response_of_its_own() {
    let mut used = BTreeSet::new();
    for service in files().iter().flat_map(|file| &file.service) {
        assert!(service.name().ends_with("Service"), "{}", service.name());
        for method in &service.method {
            assert_eq!(method.input_type(), format!(".faena.v1.{}Request", method.name()));
            assert_eq!(method.output_type(), format!(".faena.v1.{}Response", method.name()));
            assert!(used.insert(method.input_type().to_owned()), "{} is used twice", method.input_type());
            assert!(used.insert(method.output_type().to_owned()), "{} is used twice", method.output_type());
        }
    }
    assert!(!used.is_empty());
}

#[test]
fn times_and_durations_have_the_protobuf_types() {
    let is_raw = |message: &DescriptorProto| {
        let number = |kind| matches!(kind, Type::Int64 | Type::Uint64 | Type::Int32 | Type::Uint32 | Type::Double);
        let raw = message.field.iter().filter(|field| {
            number(field.r#type()) && ["_ms", "_at", "_seconds"].iter().any(|end| field.name().ends_with(end))
        });
        raw.map(|field| format!("{}.{}", message.name(), field.name())).collect::<Vec<_>>()
    };
    let raw: Vec<String> = files().iter().flat_map(|file| &file.message_type).flat_map(is_raw).collect();
    assert!(raw.is_empty(), "use google.protobuf.Timestamp or Duration: {raw:?}");
}

#[test]
fn files_are_in_the_folder_of_their_package() {
    let files = files();
    assert_eq!(files.len(), 9, "{:?}", files.iter().map(|file| file.name()).collect::<Vec<_>>());
    for file in &files {
        assert!(file.name().starts_with("faena/v1/") && file.syntax() == "proto3", "{}", file.name());
    }
}
