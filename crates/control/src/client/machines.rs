//! Machines join a rack: tokens, certificates, and the rack file.

use std::time::Duration;

use hyper::Method;

use super::{ControlClient, ControlClientError};
use crate::api::ApiError;
use crate::machines::{Certificates, JoinRequest, NewToken, RackFile, RenewRequest, TokenRequest};

impl ControlClient {
    /// Makes a token with which `host` joins once within `time`; its certificates are good for as long as usual.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn token(&self, host: &str, time: Duration) -> Result<String, ControlClientError> {
        let (host, seconds) = (host.to_owned(), time.as_secs());
        self.host_token(&TokenRequest { host, seconds, life_seconds: None }).await
    }

    /// Makes a token with which a host joins once.
    ///
    /// # Errors
    /// [`ControlClientError`]; `version`, where the control plane is older and gives the host's certificates another life.
    pub async fn host_token(&self, asked: &TokenRequest) -> Result<String, ControlClientError> {
        let made: NewToken = self.change(Method::POST, "/v1/tokens", asked).await?;
        if asked.life_seconds.is_some() && made.life_seconds != asked.life_seconds {
            let error =
                "the control plane is older, and its certificates of hosts are good for 30 days";
            let remedy = "restart all control planes with this version, or ask without --life; the token lets nobody in \
                          before you use it";
            return Err(ControlClientError::Refused(ApiError::new(
                "version",
                error.to_owned(),
                remedy,
            )));
        }
        Ok(made.token)
    }

    /// Joins the rack, as a host that has no certificate yet; the certificates (PEM).
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn join(&self, asked: &JoinRequest) -> Result<String, ControlClientError> {
        let signed: Certificates = self.change(Method::POST, "/v1/join", asked).await?;
        Ok(signed.certificates)
    }

    /// New certificates (PEM) for the node whose credentials the client has.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn renew(&self, request: &str) -> Result<String, ControlClientError> {
        let asked = RenewRequest { request: request.to_owned() };
        let signed: Certificates = self.call(Method::POST, "/v1/renew", &asked).await?;
        Ok(signed.certificates)
    }

    /// The rack file, of a rack of several machines.
    ///
    /// # Errors
    /// [`ControlClientError`].
    pub async fn rack_file(&self) -> Result<String, ControlClientError> {
        let file: RackFile = self.get("/v1/rack").await?;
        Ok(file.text)
    }
}
