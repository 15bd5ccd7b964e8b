//! Control planes on other machines: how they are named, and what to do when they do not answer.

use rackbus_control::ControlClientError;

use crate::output::Failure;

/// The address in `https://HOST:PORT`.
pub fn address_of(url: &str) -> Result<String, Failure> {
    let address = url.strip_prefix("https://").map(|rest| rest.trim_end_matches('/'));
    let has_port = |address: &&str| {
        let port =
            address.rsplit_once(':').map(|(host, port)| (host.is_empty(), port.parse::<u16>()));
        matches!(port, Some((false, Ok(1..))))
    };
    let wrong = || {
        let error = format!("{url} is not where a control plane can be");
        Failure::usage(error, "name it as `https://HOST:PORT`; it speaks TLS only")
    };
    address.filter(has_port).map(str::to_owned).ok_or_else(wrong)
}

/// What is done about a certificate that is not of the authority which a token names.
pub const OTHER_TOKEN: &str = "the token is another rack's, or was made before the rack's certificate authority was replaced: \
                               make another";

/// Why a control plane on another machine did not do what it was asked for; `again` is what to do about a certificate
/// that it refuses.
pub fn not_reached(error: ControlClientError, again: &str) -> Failure {
    match error {
        refused @ ControlClientError::Refused(_) => refused.into(),
        other if other.to_string().contains("certificate") => Failure::new(
            other.to_string(),
            format!("see that the clocks of both machines are right; else {again}"),
        ),
        other => Failure::new(
            other.to_string(),
            "start it with `rackbus control RACK.toml --listen ADDRESS:PORT`, and see that no firewall is \
             between",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_plane_is_named_by_https_with_its_port() {
        for (url, address) in [
            ("https://control:7420", "control:7420"),
            ("https://10.0.0.1:7420/", "10.0.0.1:7420"),
            ("https://[fd00::1]:7420", "[fd00::1]:7420"),
        ] {
            assert_eq!(address_of(url).unwrap(), address);
        }
        for url in [
            "http://control:7420",
            "control:7420",
            "https://control",
            "https://:7420",
            "https://c:0",
        ] {
            assert!(address_of(url).is_err(), "{url}");
        }
    }
}
